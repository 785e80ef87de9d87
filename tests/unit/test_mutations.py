"""Mutation tests: each row of the table breaks one thing in a copy of the package, and the nearest tests must fail.

If the text of a row is no longer in its file, replace it by the code that now does the same. If no test fails for a
row, add a test. All of them: `python -m pytest -m slow tests/process/test_mutations.py`; some: `-k loop`.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]


class Mutation(NamedTuple):
    """One change of a file; `before` occurs once in it."""

    file: str  # below ray_yolo/
    before: str
    after: str
    tests: str  # the nearest test files, below tests/unit/, tests/process/ or both

    def files(self) -> list[str]:
        """The paths of the test files, below the clone; the quick ones first."""
        paths = [f"tests/{tier}/{name}" for tier in ("unit", "process") for name in self.tests.split()]
        return [path for path in paths if (ROOT / path).is_file()]


DATASET, EPOCHS = "data/test_dataset.py", "engine/test_epochs.py"
EVALUATE, LOOP = "engine/test_evaluate.py", "engine/test_loop.py"
MIRROR, DOWNLOADS = "data/test_remote.py", "storage/test_slow_store.py"
WRITER, COLLECTIVES = "checkpoints/test_writer.py", "engine/test_collectives.py"
LOCAL_RAY, COORDINATOR = "runtime/test_local_ray.py", "runtime/workers/test_coordinator.py"
POOL_JOBS, TORCH_TRAINER = "runtime/workers/test_pool_jobs.py", "runtime/workers/test_torch_trainer.py"
RENDEZVOUS = "runtime/workers/test_rendezvous.py"

MUTATIONS = (
    # What the first tests did not notice
    Mutation(
        "data/dataset.py",
        "stretch(labels, factors, corner(tile, seam))",
        "stretch(labels, factors, (corner(tile, seam)[0] + 4, corner(tile, seam)[1]))",
        DATASET,
    ),
    Mutation(
        "data/dataset.py",
        "draw_colour_gains(rng, self.augment)",
        "draw_colour_gains(np.random.default_rng(0), self.augment)",
        DATASET,
    ),
    Mutation("engine/evaluate.py", "iou=config.iou", "iou=0.6", EVALUATE),
    Mutation("engine/build.py", "sharding.balanced_shard(pixels, ", "sharding.balanced_shard(pixels[1:], ", EVALUATE),
    Mutation("engine/session.py", "evaluate(components.ema.model, ", "evaluate(components.model, ", EPOCHS),
    Mutation("engine/loop.py", "statistics.recorded(later)", "statistics.recorded(0)", LOOP),
    Mutation(
        "engine/loop.py",
        "components.ema.update(components.model, summed.number + 1)",
        "components.ema.update(components.model, summed.number)",
        LOOP,
    ),
    Mutation("engine/loop.py", "(finite & norm.isfinite())", "norm.isfinite()", LOOP),
    Mutation("engine/loop.py", "    if finite:\n", "    if True:\n", LOOP),
    Mutation("engine/build.py", "torch.zeros_like(parameter)", "torch.full_like(parameter, 1.0)", LOOP),
    Mutation(
        "engine/plan.py", "schedule.warm_rates(step.batch, ", "schedule.warm_rates(max(step.batch - 1, 0), ", LOOP
    ),
    Mutation("checkpoints/local.py", "_link(folder / MANIFEST, manifest)", "pass", "checkpoints/test_local.py"),
    Mutation("models/loss_anchor_free.py", "bins - 1 - 0.01)", "bins - 1 - 0.5)", "models/test_loss_anchor_free.py"),
    Mutation(
        "models/loss_anchor_free.py",
        "truth[..., 4:] - points), 2) / strides",
        "truth[..., 4:] - points), 2) / strides[:1]",
        "models/test_loss_anchor_free.py",
    ),
    Mutation(
        "models/loss_anchor_free.py", "counts.clamp(min=1)", "counts.clamp(min=1e-3)", "models/test_loss_anchor_free.py"
    ),
    Mutation(
        "ops/assign.py", "torch.where(contested, claims.favourite, claims.first)", "claims.first",
        "ops/test_assign_align.py"
    ),
    Mutation("ops/assign.py", "TOP = 10", "TOP = 9", "ops/test_assign_align.py"),
    Mutation("inference/results.py", "np.ceil(corners", "np.floor(corners", "inference/test_results.py"),
    Mutation(
        "checkpoints/foreign.py",
        "[names.get(number, names.get(str(number))) for number in range(len(names))]",
        "list(names.values())",
        "checkpoints/test_foreign.py",
    ),
    Mutation("runs/event_log.py", "StartEvent(regrouped=False)", "StartEvent()", "runs/test_event_log.py"),
    # stores
    Mutation("data/remote.py", "fetched.size == size and (", "(", MIRROR),
    Mutation("runs/remote_run.py", 'new[:new.rfind(b"\\n") + 1]', "new", "runs/test_remote_run.py"),
    Mutation("storage/store.py", "if current != version:", "if False:", "storage/test_store.py"),
    Mutation("storage/lease.py", "if first_age + waited < EXPIRES:", "if False:", "storage/test_lease.py"),
    Mutation(
        "checkpoints/remote_checkpoints.py",
        "self._check_attempt()  # as late",
        "pass  # as late",
        "checkpoints/test_remote_checkpoints.py",
    ),
    Mutation(
        "checkpoints/remote_checkpoints.py",
        "self._check_attempt()  # again",
        "pass  # again",
        "checkpoints/test_remote_checkpoints.py",
    ),
    Mutation(
        "checkpoints/remote_checkpoints.py",
        "[name for name in names[keep:] if name not in shown]",
        "names[keep:]",
        "checkpoints/test_remote_checkpoints.py",
    ),
    Mutation("runs/remote_run.py", "if not self._lease.renew():", "if False:", "runs/test_remote_run.py"),
    Mutation("runs/remote_run.py", "and local.startswith(stored)", "", "runs/test_remote_run.py"),
    Mutation("runs/remote_run.py", "if name[:7] == names[-1][:7]", "", "runs/test_remote_run.py"),
    Mutation("runs/folders.py", "if store and not _claim(store, folder.name):", "if False:", "runs/test_run_dir.py"),
    Mutation(
        "data/remote.py", 'status.st_mtime_ns == file.time or _digest(path, "sha256") == file.sha256', "True", MIRROR
    ),
    Mutation("data/remote.py", ' and _digest(path, "md5") == tag:', ":", MIRROR),
    Mutation("data/remote.py", "(fetched.md5 == tag or not is_md5)", "True", MIRROR),
    Mutation("data/remote.py", "trusts_tags &= fetched.sha256 != previous", "pass", MIRROR),
    Mutation("data/remote.py", "if fetched.tag != tag:", "if not fetched.tag:", MIRROR),
    Mutation("data/remote.py", "while not try_lock(lock.fileno()):", "while False:", MIRROR),
    Mutation("data/remote.py", "fcntl.flock(_used[folder], fcntl.LOCK_SH)", "pass", MIRROR),
    Mutation("data/remote.py", "_remove_unused(top)\n    except", "pass\n    except", MIRROR),
    Mutation("runtime/workers/worker.py", '"train": localize(train)', '"train": train', "runtime/test_trainer.py"),
    Mutation("tune/ledger.py", "self.stored.sync_files()", "pass", "tune/test_stored.py"),
    Mutation("tune/trainable.py", "download_run(run_config.placement)", "pass", "tune/test_stored.py"),
    Mutation("storage/store.py", '{"timeout": _UNLIMITED, ', "{", DOWNLOADS),
    Mutation("storage/store.py", "if file.size == start:", "if True:", DOWNLOADS),
    Mutation("storage/store.py", ', "if_match": meta["e_tag"]', "", DOWNLOADS),
    # ops
    Mutation("ops/boxes.py", "return iou - distance - weight * aspect", "return iou - distance", "ops/test_boxes.py"),
    Mutation("ops/nms.py", "if not agnostic and len(boxes):", "if len(boxes):", "ops/test_nms.py"),
    Mutation("ops/nms.py", "~(scores > confidence)", "scores <= confidence", "ops/test_nms.py"),
    Mutation("ops/average_precision.py", "(taken[:, None] <= level) & ", "", "ops/test_average_precision.py"),
    Mutation(
        "ops/average_precision.py",
        "-scores[rows], precision[:, 0], left=1.0",
        "-scores[rows], precision[:, 0], left=0.0",
        "ops/test_average_precision.py",
    ),
    Mutation("ops/assign.py", "(distance % 1 < 0.5) & (distance > 1)", "(distance % 1 < 0.5)", "ops/test_assign.py"),
    Mutation("ops/anchors.py", ".min(axis=2).max(axis=1)", ".mean(axis=2).max(axis=1)", "ops/test_anchors.py"),
    Mutation(
        "ops/confusion.py",
        "if row not in pairs and column not in pairs.values():",
        "if row not in pairs:",
        "ops/test_confusion.py",
    ),
    Mutation("ops/coco_metrics.py", "(areas[:, None] > high)", "(areas[:, None] >= high)", "ops/test_coco_metrics.py"),
    Mutation(
        "ops/seeding.py",
        "default_rng([int(stream), *key])",
        "default_rng([int(stream), sum(key)])",
        "ops/test_seeding.py",
    ),
    Mutation(
        "tune/evolution.py",
        "weights = fitness - fitness.min() + WEIGHT_FLOOR",
        "weights = fitness + WEIGHT_FLOOR",
        "tune/test_evolution.py",
    ),
    # models and losses
    Mutation(
        "models/heads.py",
        "math.log(8 / (640 / stride) ** 2)",
        "math.log(5 / (640 / stride) ** 2)",
        "models/test_heads.py",
    ),
    Mutation("models/batch_norm.py", "var * (count / (count - 1).clamp(min=1))", "var", "models/test_batch_norm.py"),
    Mutation(
        "models/rows.py",
        "max(round(self.repeats * depth), 1) if",
        "max(int(self.repeats * depth), 1) if",
        "models/test_detector.py models/test_yaml_rows.py",
    ),
    Mutation(
        "models/blocks.py",
        "self.adds = shortcut and inputs == outputs",
        "self.adds = inputs == outputs",
        "models/test_blocks.py",
    ),
    Mutation("models/loss_anchor_based.py", "(imgsz / 640) ** 2", "(imgsz / 640)", "models/test_loss_anchor_based.py"),
    Mutation(
        "models/loss_anchor_based.py", "overlap.detach() * valid", "overlap * valid", "models/test_loss_anchor_based.py"
    ),
    # data
    Mutation("data/dataset.py", "rng.beta(32, 32)", "rng.beta(8, 8)", DATASET),
    Mutation(
        "data/dataset.py", "torch.tensor([left, top, left, top])", "torch.tensor([top, left, top, left])", DATASET
    ),
    Mutation("data/labels.py", "before[:, 1]) * zoom**2", "before[:, 1])", "data/test_labels.py"),
    Mutation(
        "data/labels.py",
        "(size[1] * along_x, size[0] * along_y)",
        "(size[0] * along_x, size[1] * along_y)",
        "data/test_labels.py",
    ),
    Mutation(
        "data/mosaic.py",
        "return range(down.target.start, down.target.stop)",
        "return range(down.target.start + 1, down.target.stop)",
        "data/test_mosaic.py",
    ),
    Mutation("data/augment.py", "image[:rows.start] = image[rows.stop:] =", "_ =", "data/test_augment.py"),
    Mutation("data/augment.py", "-0.4999", "0", "data/test_augment.py"),
    Mutation(
        "data/augment.py", "(np.arange(256) * hue_gain % 180)", "(np.arange(256) * hue_gain)", "data/test_augment.py"
    ),
    Mutation("data/image_cache.py", " and not (original % part).any()", "", "data/test_image_cache.py"),
    Mutation(
        "data/image_cache.py",
        "original >= part * target",
        "original >= (part - 1) * target",
        "data/test_image_cache.py",
    ),
    Mutation("data/images.py", "COLOR_RGB | _REDUCED[reduction]", "COLOR_RGB", "data/test_images.py"),
    Mutation(
        "data/coco.py", "path: self._rows[path] for path in paths", "path: [] for path in paths", "data/test_index.py"
    ),
    Mutation("ops/sharding.py", "loads[least] += costs[item]", "loads[least] += 1", "ops/test_sharding.py"),
    Mutation(
        "data/index.py",
        "missing = (1 - average_precisions) ** 2",
        "missing = 1 - average_precisions",
        "data/test_index_survey.py",
    ),
    Mutation(
        "data/image_cache.py",
        "cv2.INTER_AREA if smooth and shrinks",
        "cv2.INTER_AREA if shrinks",
        "data/test_image_cache.py",
    ),
    Mutation(
        "data/augment.py",
        "(augment.hsv_h, augment.hsv_s, augment.hsv_v)",
        "(augment.hsv_v, augment.hsv_s, augment.hsv_h)",
        "data/test_augment.py",
    ),
    Mutation("data/dataset.py", "    os.setpgid(0, 0)\n", "", DATASET),
    Mutation("data/dataset.py", "while signal.sigtimedwait(GROUP_SIGNALS, 0):", "while False:", DATASET),
    Mutation(
        "data/dataset.py",
        "signal.SIG_BLOCK, GROUP_SIGNALS)\n        forkserver",
        "signal.SIG_UNBLOCK, GROUP_SIGNALS)\n        forkserver",
        DATASET,
    ),
    # engine
    Mutation("engine/loop.py", "targets[:, 3::2].mul_(shape[0] / height)", "pass", LOOP),
    Mutation("engine/loop.py", "    optimizer.zero_grad(set_to_none=True)", "    pass", LOOP),
    Mutation("engine/loop.py", "components.optimizer.zero_grad(set_to_none=True)  # the", "pass  # the", LOOP),
    Mutation(
        "engine/build.py",
        "components.ema.limit, components.ema.ramp = recipe.schedule.ema_decay, recipe.schedule.ema_ramp",
        "pass",
        EPOCHS,
    ),
    Mutation("engine/session.py", "fitness <= state.best_fitness", "fitness < state.best_fitness", EPOCHS),
    Mutation("engine/session.py", "progress.epoch % period == 0", "last_epoch.epoch % period == 0", EPOCHS),
    Mutation("engine/session.py", "metrics.ap.mean(1).tolist()", "metrics.ap[:, 0].tolist()", EPOCHS),
    Mutation("engine/evaluate.py", "        wait_for(found)", "        pass", "engine/test_devices.py"),
    Mutation("engine/evaluate.py", "multi_label=model.num_classes > 1", "multi_label=False", EVALUATE),
    Mutation("data/yolo_txt.py", "[*size[::-1], *size[::-1]]", "[*size, *size]", "inference/test_output.py"),
    Mutation("checkpoints/foreign.py", "> path.stat().st_size", "> 1 << 60", "checkpoints/test_foreign.py"),
    Mutation(
        "checkpoints/foreign.py", "for model in models:", "for model in models[1:]:", "checkpoints/test_foreign.py"
    ),
    Mutation("inference/results.py", "(y1 + y2) / 2, x2 - x1", "(y1 + y2) / 2, x2", "inference/test_results.py"),
    Mutation("data/sources.py", "picture[..., 2::-1]", "picture[..., :3]", "data/test_sources.py"),
    Mutation("data/voc.py", '"annots", ', "", "data/test_layouts.py"),
    Mutation("sinks/metric_names.py", "(getattr(row, part) or {})", "row.train", "sinks/test_metric_names.py"),
    Mutation("runs/event_log.py", "<= min(limit, committed)", "<= committed", "runs/test_event_log.py"),
    Mutation("sinks/base.py", "sink.update(last)", "sink.update(self._stopping.is_set())", "sinks/test_base.py"),
    Mutation("engine/loop.py", "of_this_step & ~cut.any()", "of_this_step", LOOP),
    Mutation(
        "engine/collectives.py",
        "(values ^ check).eq(~step).all()",
        "values.contiguous().view(torch.float32).isfinite().all()",
        COLLECTIVES,
    ),
    Mutation(
        "engine/collectives.py",
        "socket.create_server((host, 0), family=family)",
        'socket.create_server(("", 0), family=family)',
        COLLECTIVES,
    ),
    Mutation(
        "engine/membership.py",
        "return WRITE_SECONDS + self.heartbeat_limit",
        "return self.heartbeat_limit",
        "engine/test_membership.py",
    ),
    Mutation("checkpoints/writer.py", "self.waited = time.monotonic() - began", "pass", WRITER),
    Mutation("checkpoints/writer.py", "self.wrote = time.monotonic() - began", "pass", WRITER),
    Mutation(
        "checkpoints/writer.py",
        "max(LOSS_SECONDS - saver.wrote, 2 * saver.wrote, saver.waited / COST)",
        "LOSS_SECONDS",
        WRITER,
    ),
    Mutation("runs/run_dir.py", "    if other:\n", "    if False:\n", "runs/test_run_dir.py"),
    Mutation("runs/run_dir.py", 'exclude={"data"}, ', "", "runs/test_run_dir.py"),
    Mutation(
        "runs/run_dir.py",
        "if labels is None or not isinstance(record, RunRecord):",
        "if True:",
        "runs/test_run_dir.py",
    ),
    # runtime
    Mutation(
        "inference/predictor.py",
        "size = imgsz or trained.imgsz",
        "size = trained.imgsz",
        "runtime/test_validator_numbers.py",
    ),
    Mutation(
        "sinks/metric_names.py",
        'Metric(COLUMNS[name], f"metrics/{name}", measured(name))',
        'Metric(COLUMNS[name], f"metrics/{name}", measured("precision"))',
        "sinks/test_mlflow_plan.py",
    ),
    Mutation(
        "sinks/report.py",
        "format_duration(batches_left * self._batch_size / self._images_per_second)",
        "format_duration(batches_left / self._images_per_second)",
        "sinks/test_report.py",
    ),
    Mutation("tune/schedule.py", "if end <= closing.closed.until:", "if end:", "tune/test_schedule.py"),
    Mutation("runtime/workers/coordinator.py", "if view.is_deadlock():", "if False:", COORDINATOR),
    Mutation(
        "runtime/workers/coordinator.py",
        "len(self.inside) > 1\n                and not self.broken)",
        "True)",
        COORDINATOR,
    ),
    Mutation(
        "runtime/workers/coordinator.py",
        "return max(silent, self.waited(worker) - worker.heartbeat.limit)",
        "return self.waited(worker) - worker.heartbeat.limit",
        COORDINATOR,
    ),
    Mutation(
        "runtime/workers/coordinator.py",
        "return SILENT not in worker.state and (WAITING in worker.state or is_in_exchange)",
        "return WAITING in worker.state or is_in_exchange",
        COORDINATOR,
    ),
    Mutation("runtime/local_ray.py", "        os.setpgid(0, 0)", "        pass", LOCAL_RAY),
    Mutation("runtime/cluster.py", "with in_own_groups():", "if True:", LOCAL_RAY),
    Mutation("runtime/cluster.py", "str(session_folder())", '"/tmp/ray"', LOCAL_RAY),
    Mutation("runtime/workers/worker.py", "    prepare_process()\n", "", POOL_JOBS),
    Mutation("runtime/workers/worker.py", "while not received_sigterm():", "while True:", POOL_JOBS),
    Mutation("runtime/workers/worker.py", "        release_frames(error)\n", "", POOL_JOBS),
    Mutation("runtime/workers/rendezvous.py", "self._is_recalled |= reply.must_leave", "pass", RENDEZVOUS),
    Mutation("runtime/workers/torch_trainer.py", "if trains:", "if False:", TORCH_TRAINER),
    Mutation(
        "runtime/workers/torch_trainer.py", "return in_place_backend(prepare_process)", "return in_place_backend(int)",
        TORCH_TRAINER,
    ),
    Mutation(
        "runtime/workers/torch_trainer.py", "draining = draining or _stop_on_draining_nodes(policy)", "pass",
        TORCH_TRAINER,
    ),
    Mutation(
        "runtime/workers/torch_trainer.py",
        "draining, _ = drain_nodes(coordinator.drain_nodes, draining, policy.notify)", "pass", TORCH_TRAINER,
    ),
    Mutation("runtime/workers/worker.py", "(coordinator is None and received_sigterm())", "False", RENDEZVOUS),
    Mutation("runtime/workers/worker.py", "if summary is None and received_sigterm():", "if False:", RENDEZVOUS),
    Mutation("runtime/workers/rendezvous.py", ", self._leaves())", ")", RENDEZVOUS),
    Mutation("runtime/workers/coordinator.py", "if heartbeat.must_leave:", "if False:", COORDINATOR),
    Mutation(
        "runtime/workers/rendezvous.py",
        "activity.limit,\n                         activity.heartbeat_limit, self._leaves())",
        "activity.limit, must_leave=self._leaves())",
        RENDEZVOUS,
    ),
    Mutation("runtime/workers/rendezvous.py", "LOOPBACK if os.environ.get(cluster.LOCAL) else ", "", RENDEZVOUS),
    # plots
    Mutation(
        "plots/metrics.py",
        "np.maximum(matrix.sum(axis=0), 1)",
        "np.maximum(matrix.sum(axis=1), 1)",
        "plots/test_metrics.py",
    ),
    Mutation("plots/labels.py", "(left + right) / 2 / width", "(left + right) / 2 / height", "plots/test_labels.py"),
    Mutation("plots/boxes.py", "detections[::-1].tolist()", "detections.tolist()", "plots/test_boxes.py"),
    # config
    Mutation("config/recipe.py", "if num_workers > units:", "if num_workers >= units:", "engine/test_plan.py"),
    Mutation(
        "config/flags.py",
        "given |= options.given\n",
        "given = options.given | given\n",
        "config/test_flags.py",
    ),
    Mutation("core/redact.py", r"[^/\s]*@", r"[^/\s@]*@", "core/test_redact.py"),
    # tune
    Mutation("tune/space.py", 'log=self.type == "loguniform"', "log=False", "tune/test_space.py"),
    Mutation(
        "config/sections.py", "if not weight:  # the metric", "if False:  # the metric", "tune/test_search.py"
    ),
    Mutation("tune/schedule.py", "-(-4 * epochs // 9)", "4 * epochs // 9", "tune/test_schedule.py"),
    Mutation("tune/schedule.py", "continued < len(others) // REDUCTION", "True", "tune/test_schedule.py"),
    Mutation("tune/schedule.py", "wins = claim.ahead or", "wins = claim.better or", "tune/test_schedule.py"),
    Mutation("tune/claim.py", "ahead=min(shown, gain) > 0", "ahead=gain > 0", "tune/test_claim.py"),
    Mutation("tune/claim.py", "expected[0] - DOUBT * expected[1], ", "expected[0], ", "tune/test_claim.py"),
    Mutation("tune/surrogate.py", "SHARED = 0.7", "SHARED = 0.0", "tune/test_surrogate.py"),
    Mutation("tune/surrogate.py", "return nearest(gene, float(", "return (float(", "tune/test_space.py"),
    Mutation("tune/files.py", "in trials if trial.fitness is not None]", "in trials]", "tune/test_files.py"),
)


def test_the_table_is_true() -> None:
    """Quick, so that a change of a line in the table fails at once."""
    for mutation in MUTATIONS:
        count = (ROOT / "ray_yolo" / mutation.file).read_text().count(mutation.before)
        assert count == 1, f"{mutation.file}: {mutation.before!r} occurs {count} times; correct its row of the table"
        for name in mutation.tests.split():
            found = any(path.endswith(f"/{name}") for path in mutation.files())
            assert found, f"{mutation.file}: {mutation.before!r} names {name}"
