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
    """'; did you mean X?' with the value of the spelling that is near in meaning or letters; '' if none is.

    A word of another program goes before letters. Letters are near if a few typing errors separate them: one in words
    of up to 4 letters, two in words of up to 8, else three.
    """
    plain_word = _plain(word)
    by_plain: dict[str, str] = {}
    for spelling, meaning in spellings.items():
        by_plain.setdefault(_plain(spelling), meaning)
    meant = [_MEANS.get(plain_word, ""), *_INSTEAD.get(plain_word, ())]
    for path in filter(None, meant):
        last = _plain(path.rpartition(".")[2])
        for name in (_plain(path), last):
            if name in by_plain:
                return f"; did you mean {by_plain[name]}?"
    allowed = 1 if len(plain_word) <= 4 else 2 if len(plain_word) <= 8 else 3
    distances = {name: edit_distance(plain_word, name, allowed) for name in by_plain if name}
    nearest = min(distances, key=distances.__getitem__, default="")  # of equally near ones the first
    if nearest and distances[nearest] <= allowed:
        return f"; did you mean {by_plain[nearest]}?"
    return ""


def _plain(word: str) -> str:
    """A word without leading hyphens, upper case and the choice of separator."""
    return word[:_LONGEST].lstrip("-").replace("_", "-").casefold()


def edit_distance(one: str, other: str, limit: int) -> int:
    """Insertions, deletions, substitutions and swaps of neighbours that turn one word into another, where each letter
    is edited once (Damerau 1964); `limit` + 1 if there are more than `limit`."""
    if abs(len(one) - len(other)) > limit:
        return limit + 1
    before, last = list[int](), list(range(len(other) + 1))
    for row, letter in enumerate(one, 1):
        current = [row]
        for column, counterpart in enumerate(other, 1):
            cost = min(last[column] + 1, current[-1] + 1, last[column - 1] + (letter != counterpart))
            swapped = row > 1 and column > 1 and letter == other[column - 2] and one[row - 2] == counterpart
            current.append(min(cost, before[column - 2] + 1) if swapped else cost)
        before, last = last, current
    return min(last[-1], limit + 1)
