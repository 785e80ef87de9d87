"""The pages: they build without a warning, their commands are accepted, and the notebook runs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ray_yolo.cli import COMMANDS
from ray_yolo.core.system import SPINS
from tests.unit.test_docs import DOCS, PAGES, PARSED


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pages as `make docs` builds them."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run([sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-d", folder / "doctrees", DOCS,
                           folder / "html"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder / "html"


def shown(page: Path) -> str:
    """The text of a page without its tags."""
    return re.sub(r"<[^>]+>", "", page.read_text()).replace("&#64;", "@")


@pytest.mark.slow
def test_the_site_has_every_page_and_each_is_in_the_contents(site: Path) -> None:
    contents = (site / "index.html").read_text()
    headings = {name: text.partition("# ")[2].partition("\n")[0] for name, text in PAGES.items()}
    made = {name: (site / f"{name}.html").read_text() for name in PAGES}
    assert [name for name, heading in headings.items() if f"<h1>{heading}<" not in made[name]] == []
    assert [name for name in PAGES if f'href="{name}.html"' not in contents and name != "index"] == []
    assert list(site.rglob("first_training.ipynb"))


@pytest.mark.slow
def test_the_command_reference_has_every_command_and_flag(site: Path) -> None:
    text = shown(site / "commands.html")
    assert [name for name in COMMANDS if f"python -m ray_yolo.{name}" not in text] == []
    for command in PARSED.values():
        assert [flag for flag in command.flags if flag not in text] == []


@pytest.mark.slow
def test_the_interface_is_described_from_its_docstrings(site: Path) -> None:
    text = (site / "api.html").read_text()
    for name in ("ray_yolo.YOLO.train", "ray_yolo.YOLO.predict", "ray_yolo.inference.results.Boxes.xywhn",
                 "ray_yolo.runtime.trainer.TrainResult.best_epoch", "ray_yolo.core.errors.ResourcesError"):
        assert f'id="{name}"' in text
    assert "on_epoch_end(event)" in text


@pytest.mark.slow
def test_no_page_loads_anything_from_another_machine(site: Path) -> None:
    for page in site.glob("*.html"):
        assert re.findall(r'(?:src|<link[^>]+href)="(?:https?:)?//[^"]+', page.read_text()) == []


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_notebook_runs(tmp_path: Path) -> None:
    cells = json.loads((DOCS / "first_training.ipynb").read_text())["cells"]
    code = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    seen = ("assert len(results) == 64 and (result.run_dir / 'weights' / 'best.pt').exists() and len(first) >= 3 and "
            "validation.metrics['mAP50'] > 0.85")
    done = subprocess.run([sys.executable, "-c", f"{code}\n\n{seen}\n"], cwd=tmp_path, env={**os.environ, **SPINS},
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


@pytest.mark.slow
def test_python_blocks_of_the_pages_run(tmp_path: Path) -> None:
    """The README's training first: the pages use its run."""
    train = ("YOLO('yolov5n').train(data='shapes8', imgsz=64, epochs=1, num_workers=0, name='exp', "
             "registered_name='detector')")
    pages = PAGES["api"] + PAGES["deploy"]
    blocks = re.findall(r"```python\n(.*?)```", pages, re.DOTALL)
    assert len(blocks) == 4
    code = "\n".join(["from ray_yolo import YOLO", train, *blocks])
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env={**os.environ, **SPINS}, capture_output=True,
                          text=True, check=False)
    assert done.returncode == 0, done.stderr
