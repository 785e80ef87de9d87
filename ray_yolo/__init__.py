"""Distributed training of YOLO detectors on Ray."""
