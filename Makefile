# Two commands do everything: `make demo` trains, `make test` tests. Both set the environment up first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

UV ?= uv

.PHONY: demo test test-all test-again mutants floor-test gpu-test cluster-test check docs bench bench-env clean

unexport PYTHONDONTWRITEBYTECODE  # each process would compile what it imports

# uv installs from pip's index, side by side; where it cannot be had, pip does the same. Compiling all of it takes longer.
define install
INDEX="$${PIP_INDEX_URL:-$$($(BIN)/pip config get global.index-url 2>/dev/null)}"; \
UV_DEFAULT_INDEX="$${UV_DEFAULT_INDEX:-$$INDEX}" $(BIN)/uv pip install --quiet --python $(BIN)/python -c constraints.txt \
    -e '$(1)' || $(BIN)/pip install --quiet --no-compile -c constraints.txt -e '$(1)'
endef

$(VENV)/.base: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	-$(BIN)/pip install --quiet uv
	$(call install,.)
	$(BIN)/python -c "import ray_yolo.runtime.trainer, ray.train.torch, ray.tune, mlflow, matplotlib.pyplot"  # compiles them
	touch $@

$(VENV)/.dev: $(VENV)/.base
	$(call install,.[dev])
	touch $@

demo: $(VENV)/.base  ## train on the built-in data set with two Ray workers on CPU
	$(BIN)/python -m ray_yolo.train --data shapes --model yolov5nu --imgsz 128 --epochs 50 --batch-size 8 \
	    --num-workers 2 --cache ram --optimizer AdamW --set optimizer.lr0=0.002 --set optimizer.nominal_batch=8 \
	    --set schedule.warmup_epochs=2 --set schedule.warmup_min_batches=0 --set schedule.warmup_bias_lr=0.002 \
	    --set schedule.ema_ramp=100 --set schedule.lrf=0.05 --set augment.mosaic=0 --set augment.scale=0.3 \
	    --project runs/demo

PYTEST := -m pytest -q -n 2 --dist loadscope --no-loadscope-reorder

test: $(VENV)/.dev  ## the unit tests, and one real use of each mechanism
	$(BIN)/python $(PYTEST) --hypothesis-profile quick tests/unit
	$(BIN)/python $(PYTEST) -m smoke tests/process

test-all: $(VENV)/.dev  ## all tests that need nothing outside the clone
	$(BIN)/python $(PYTEST)

test-again: $(VENV)/.dev  ## the tests that failed in the last run, or all if it named none, one after the other
	$(BIN)/python -m pytest -q --last-failed --last-failed-no-failures all

SINCE ?= HEAD~1

mutants: $(VENV)/.mutants  ## faults that no unit test notices, in the files that changed SINCE a commit, or in FILES
	$(BIN)/python tests/mutants.py --since $(SINCE) $(FILES)

$(VENV)/.mutants: $(VENV)/.dev
	$(call install,.[mutants])
	touch $@

gpu-test:  ## is a training on this machine's GPU right, and how fast; needs torch, numpy, OpenCV, pydantic, PyYAML alone
	PYTHONPATH=. $(PYTHON) tests/benchmarks/gpu.py --write tests/benchmarks/gpu.md

floor-test: .venv-floor/.made  ## all these tests with the lowest versions that pyproject.toml allows
	.venv-floor/bin/python $(PYTEST)

.venv-floor/.made: pyproject.toml
	$(UV) venv --clear --quiet --python $(PYTHON) .venv-floor
	$(UV) pip install --quiet --python .venv-floor/bin/python --resolution lowest-direct -e .[dev]
	touch $@

cluster-test: $(VENV)/.dev  ## clusters of two machines in namespaces of this one, SLURM among them; needs root
	$(BIN)/python -m pytest -q -m root -rs tests/cluster

check: $(VENV)/.dev  ## style and types
	$(BIN)/ruff check .
	$(BIN)/mypy ray_yolo
	$(BIN)/mypy --explicit-package-bases tests/benchmarks/gpu.py  # much of it runs on a GPU alone

docs: $(VENV)/.dev  ## the pages of docs/ as a site in build/docs
	$(BIN)/python -m sphinx -W --keep-going -q docs build/docs

bench: $(VENV)/.dev .bench/.made  ## the quick benchmarks, their ratios beside the committed ones
	$(BIN)/python tests/benchmarks/run.py quick

bench-env: .bench/.made  ## YOLOv5 and Ultralytics in an environment of their own

.bench/.made: tests/benchmarks/peers.txt
	$(PYTHON) -m venv .bench
	.bench/bin/pip install --quiet -r $<
	touch $@

clean:
	rm -rf $(VENV) .venv-floor .bench build dist *.egg-info
