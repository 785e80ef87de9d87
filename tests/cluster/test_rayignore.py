""".rayignore: what `ray job submit --working-dir .` sends from a clone, by Ray's own packaging."""

import shutil
import zipfile
from pathlib import Path

from ray._private.runtime_env.packaging import create_package

ROOT = Path(__file__).parents[2]
SECRETS = (".env", "mlflow.env", ".netrc", ".aws/credentials", "auth_token", "token.txt", "mlartifacts/1/model.pt",
           "mlflow.db", "runs/train/exp/opt.yaml", "data/images/a.jpg", "data/data.yaml", "best.pt", ".git/config",
           "ray_yolo/.env", "ray_yolo/__pycache__/api.pyc")
WANTED = ("data.yaml", "hyp.yml", "callbacks.py", "ray_yolo/api.py", "ray_yolo/config/flags.py",
          "tune_spaces/ladder.yaml")


def test_the_package_and_settings_are_sent_and_nothing_else(tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    for name in (*SECRETS, *WANTED):
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        (clone / name).write_text("canary")
    for name in (".gitignore", ".rayignore"):
        shutil.copy(ROOT / name, clone)
    create_package(str(clone), tmp_path / "package.zip", include_gitignore=True)
    with zipfile.ZipFile(tmp_path / "package.zip") as package:
        assert {name for name in package.namelist() if not name.endswith("/")} == {*WANTED}
