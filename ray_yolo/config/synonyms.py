"""Hints for unknown words: typing errors by edit distance, and words that other programs use for our settings."""

from __future__ import annotations

from collections.abc import Mapping

_LONGEST = 60  # characters of a word that is compared

_SYNONYMS = {
    "num_workers": "gpus gpu n-gpus ngpus num-gpus gpu-ids device-ids world-size nproc nproc-per-node nnodes num-nodes "
                   "nodes num-processes",
    "workers": "num-loaders loader-workers dataloader-workers num-data-workers data-workers",
    "precision": "amp half fp16 bf16 fp32 use-amp mixed-precision float16 bfloat16",
    "optimizer.lr0": "lr learning-rate initial-lr base-lr init-lr",
    "optimizer.momentum": "mom",
    "optimizer.weight_decay": "wd decay",
    "optimizer.name": "optim opt optimiser",
    "optimizer.clip_norm": "grad-clip clip-grad max-grad-norm gradient-clip-val",
    "optimizer.nominal_batch": "nbs accumulate grad-accum accum gradient-accumulation-steps accumulate-grad-batches",
    "schedule.lrf": "final-lr lr-final min-lr",
    "schedule.cos_lr": "cosine cos lr-scheduler scheduler",
    "schedule.warmup_epochs": "warmup warm-up warmup-steps",
    "schedule.ema_decay": "ema",
    "epochs": "num-epochs max-epochs n-epochs iterations max-iter total-epochs",
    "batch_size": "bs batchsize train-batch-size total-batch-size images-per-batch",
    "microbatch": "batch-size-per-gpu samples-per-gpu micro-batch-size",
    "imgsz": "image-size img-sz input-size size resolution",
    "weights": "pretrained checkpoint ckpt load init-weights",
    "model": "arch architecture backbone network net",
    "data": "dataset data-dir data-root",
    "source": "input images image img img-path video",
    "confidence": "conf-threshold score-thr score-threshold threshold min-score",
    "iou": "nms-iou iou-threshold nms-threshold nms-thres",
    "max_detections": "max-dets max-per-img topk",
    "project": "output output-dir out out-dir save-dir log-dir logdir runs-dir work-dir",
    "name": "experiment exp run-name",
    "exist_ok": "overwrite force",
    "patience": "early-stopping early-stop",
    "exact": "deterministic reproducible",
    "sync_bn": "sync-batchnorm syncbn sync-batch-norm",
    "save_period": "save-interval save-freq save-every checkpoint-interval checkpoint-freq",
    "mlflow_uri": "tracking-uri mlflow wandb tracking",
    "storage_path": "storage",
    "address": "ray-address master-addr master-port dist-url cluster",
    "resume": "continue restart auto-resume",
    "single_cls": "single-class one-class",
    "nosave": "no-save dont-save",
    "noplots": "no-plots no-plot",
    "noval": "no-val skip-val",
    "freeze": "freeze-layers freeze-backbone",
    "num_replicas": "replicas instances",
    "trials": "n-trials num-trials num-samples generations",
    "format": "export-format to",
    "opset": "opset-version",
}
"""Setting -> words of other programs for it."""
_MEANS = {word: path for path, words in _SYNONYMS.items() for word in words.split()}
# Words of the settings of training that mean another setting in commands that use weights.
_INSTEAD = {"model": ("weights",), "cfg": ("weights",), "weights": ("model",)}


def did_you_mean(word: str, spellings: Mapping[str, str]) -> str:
    """'; did you mean X?', X being the value of the spelling that is near in meaning or letters; '' if none is.

    A known word of another program decides before a similar spelling does. Letters are near if a few typing errors
    separate them: one in words of up to 4 letters, two in words of up to 8, else three.
    """
    plain_word = _plain(word)
    by_plain: dict[str, str] = {}
    for spelling, meaning in spellings.items():
        by_plain.setdefault(_plain(spelling), meaning)
    meant = list(_INSTEAD.get(plain_word, ()))
    if plain_word in _MEANS:
        meant.insert(0, _MEANS[plain_word])
    for path in meant:
        last = _plain(path.rpartition(".")[2])
        for name in (_plain(path), last):
            if name in by_plain:
                return f"; did you mean {by_plain[name]}?"
    near, least = "", _allowed_errors(plain_word) + 1
    for name in by_plain:
        distance = edit_distance(plain_word, name, least)
        is_longer = len(name) > len(near) > 0  # of equally near ones the longest: a letter is left out more often
        if name and (distance < least or (distance == least and is_longer)):
            near, least = name, distance
    return f"; did you mean {by_plain[near]}?" if near else ""


def _allowed_errors(word: str) -> int:
    """How many typing errors a word may have; in a short word, a few turn it into any other."""
    if len(word) <= 4:
        return 1
    return 2 if len(word) <= 8 else 3


def _plain(word: str) -> str:
    """A word without leading hyphens, upper case and the choice of separator."""
    return word[:_LONGEST].lstrip("-").replace("_", "-").casefold()


def edit_distance(one: str, other: str, limit: int) -> int:
    """Insertions, deletions, substitutions and swaps of neighbours that turn one word into another, where each letter
    is edited once (Damerau 1964); `limit` + 1 if there are more than `limit`.

    A table of distances between beginnings: row r, column c is that of the first r letters of `one` to the first c of
    `other`. Only the last three rows are kept.
    """
    if abs(len(one) - len(other)) > limit:
        return limit + 1
    two_above: list[int] = []
    above = list(range(len(other) + 1))  # the distance from the empty word: insert every letter
    for r in range(1, len(one) + 1):
        row = [r]  # the distance to the empty word: delete every letter
        for c in range(1, len(other) + 1):
            is_same = one[r - 1] == other[c - 1]
            deleted = above[c] + 1
            inserted = row[c - 1] + 1
            substituted = above[c - 1] + (0 if is_same else 1)
            distance = min(deleted, inserted, substituted)
            if r > 1 and c > 1 and one[r - 1] == other[c - 2] and one[r - 2] == other[c - 1]:
                swapped = two_above[c - 2] + 1
                distance = min(distance, swapped)
            row.append(distance)
        two_above, above = above, row
    return min(above[-1], limit + 1)
