"""What `--dry-run` says is what the start does: it refuses the same, in the same words, and shows what is decided."""

from __future__ import annotations

from pathlib import Path

import yaml

from tests.unit.test_dry_run import TRAIN, Say, folder, say

__all__ = ["folder", "say"]  # fixtures


def test_a_dry_run_shows_what_the_start_then_decides(say: Say, folder: Path) -> None:
    line = f"train {TRAIN} --num-workers 0 --cpus-per-worker 2 --noval --patience 5 --project mine --exact"
    dry = say(f"{line} --dry-run")
    assert dry.status == 0, dry.err
    assert not (folder / "mine").exists()
    start = say(line)
    assert start.status == 0, start.err
    shown, trained = (yaml.safe_load(text) for text in (dry.out, (folder / "mine/exp/opt.yaml").read_text()))
    recipe = trained["recipe"] | {"changes": []}
    assert {name: shown[name] for name in ("batch_size", "microbatch", "precision", "threads")} == {
        "batch_size": 16, "microbatch": 16, "precision": "fp32", "threads": 1}
    assert {name: value for name, value in recipe.items() if name in shown} == {
        name: shown[name] for name in recipe if name in shown}
    settings = ("batch 16, microbatch 16, accumulation 4 (64 images per step), precision fp32, "
                "learning rate 0.01 (SGD)")
    unused = "no effect: patience (under noval, there is no validation before the last epoch)"
    for note in (settings, unused):
        assert f"# {note}\n" in dry.out
        assert f"\n{note}\n" in start.out
