"""A package that brings a family of its own: what its entry point names. It imports no torch."""

from ray_yolo.config.model_facts import ModelFacts, Plugin

READS = frozenset({"loss.box", "loss.cls", "loss.dfl", "evaluate.iou"})
PLUGIN = Plugin({"toy": ModelFacts("toy", gains={"box": 7.5}, reads=READS)}, "toy_family.code:FAMILY")
