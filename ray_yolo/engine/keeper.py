"""When a training is saved, and its saves: checkpoints, and the detections of the best epoch."""

from __future__ import annotations

import contextlib
import math
import time
from concurrent.futures import Future

import numpy as np

from ray_yolo.checkpoints import state_file
from ray_yolo.checkpoints.layout import checkpoint_folder
from ray_yolo.checkpoints.writer import WRITE_SECONDS, Saver, save_interval
from ray_yolo.config.placement import Placement
from ray_yolo.core.errors import TrainingError
from ray_yolo.core.events import CheckpointEvent, Emit, WarningEvent
from ray_yolo.core.files import replacing
from ray_yolo.core.structures import Orders
from ray_yolo.core.threads import run_in_thread
from ray_yolo.engine.evaluate import DETECTIONS_FILE, Evaluation
from ray_yolo.engine.learner import Learner
from ray_yolo.engine.plan import Step
from ray_yolo.engine.spec import TrainSpec, WorkerContext
from ray_yolo.engine.state import about, capture

LEAVING_SECONDS = 10.0  # two saves are this far apart while all workers drain: their nodes can disappear at any moment


class Keeper:
    """Decides when a training is saved, and saves it. On all workers it decides the same; the recording worker saves.

    A save is a thread's work. Training waits for it before the next one, and where the order of files or events needs
    it.
    """

    def __init__(self, spec: TrainSpec, context: WorkerContext, placement: Placement, emit: Emit) -> None:
        self._spec, self._context, self._placement, self._emit = spec, context, placement, emit
        self.saver = Saver(spec.run_dir, spec.digest, placement.keep_checkpoints, emit, context.stored)
        self._requested = -math.inf
        """Time of the last request to save in this generation."""
        self._saved = time.monotonic()
        """Start of the last save."""
        self._resumed = -1
        """Step of the checkpoint from which training continued."""
        self._detections: Future[None] | None = None
        """The file of the best epoch's detections, being written."""

    def continue_from(self, step: int) -> None:
        """Training continues from the checkpoint of a step; step 0: from none."""
        self.saver.step = self._resumed = step

    def forget_request(self) -> None:
        """A new generation begins: the step that was to be saved may have been abandoned."""
        self._requested = -math.inf

    def add_save(self, orders: Orders, *, is_writer: bool) -> Orders:
        """A worker's orders, as it sends them to the others: with the saves that are due by time.

        The recording worker adds a save if the last one is too old. If it is ordered to save because all workers leave,
        it saves at once and again after every `LEAVING_SECONDS`. If they leave after this step, this step is saved,
        whichever worker learns of it first.
        """
        now = time.monotonic()
        leaving = orders.save and now - self._requested >= LEAVING_SECONDS
        since = now - max(self._saved, self._requested)
        late = since >= save_interval(self._placement.save_seconds, self.saver)
        save = is_writer and (leaving or late)
        if save:  # noted here, because on a GPU the next step polls before this save starts
            self._requested = now
        return orders._replace(save=save or (orders.save and orders.regroup))

    def is_due(self, step: Step, number: int, orders: Orders) -> bool:
        """Whether a step is saved that has just ended, by the orders of all workers. The epoch's last one is saved by
        its end."""
        if self._placement.nosave:
            return False
        if orders.stop or (orders.regroup and orders.save):  # no other worker may take over the state
            return True
        inside_epoch, every = step.images.stop < len(self._spec.train), self._placement.save_steps
        return inside_epoch and bool(orders.save or (every and number % every == 0))

    def lacks(self, learner: Learner) -> bool:
        """Whether states are saved, and no save of this one has begun."""
        return not self._placement.nosave and learner.state.progress.step > self.saver.step

    def has_stored(self, learner: Learner) -> bool:
        """Whether nothing of this state has to be saved before the worker leaves."""
        return self._placement.nosave or self.saver.written == learner.state.progress.step

    def save(self, learner: Learner, agreed: int) -> None:
        """Start to save the state; between two epochs, also under the names that the last epoch is entitled to.

        Args:
            agreed: the newest step after which all workers have compared their weights.
        """
        state, period, kinds = learner.state, self._placement.save_period, ["last"]
        progress = state.progress
        if (last_epoch := state.last_epoch) and not progress.images_in_epoch:
            kinds += ["best"] * last_epoch.best
            kinds += [f"epoch{last_epoch.epoch}"] * (period > 0 and progress.epoch % period == 0)
        self._context.activity.enter("saving")
        self._saved = time.monotonic()
        self.saver.save(capture(learner, about(self._spec)), progress.step, progress.epoch, kinds,
                        compared=progress.step == agreed)

    def save_last(self, learner: Learner, agreed: int, *, stopped: bool) -> None:
        """Save the state in which training ends, and wait until everything is on storage.

        Raises:
            TrainingError: if it cannot be written, unless training was stopped.
        """
        step = learner.state.progress.step
        if step > self.saver.step and not (stopped and self._placement.nosave):
            self.save(learner, agreed)
        elif step == self._resumed:  # the process that saved it may have ended before the report
            self._emit(CheckpointEvent(
                step=step, epoch=learner.state.progress.epoch, kinds=(), digest=state_file.digest(capture(learner, {})),
                path=str(checkpoint_folder(self._spec.run_dir, step))))
        self.wait(needed=not stopped)
        self.await_detections()

    def wait(self, *, needed: bool = False) -> None:
        """Wait for the save in progress, within its time limit."""
        self._context.activity.enter("saving")
        self.saver.wait(needed=needed)
        self._context.activity.enter("computing")

    def keep_detections(self, evaluation: Evaluation) -> None:
        """Store the best epoch's detections, from which plots are drawn at the end of training, in a thread."""
        self.await_detections()
        path, stored = self._spec.run_dir / DETECTIONS_FILE, self._context.stored

        def write() -> None:
            self.saver.check_in_place()
            with replacing(path, durable=False) as temporary:  # plots are drawn by another process
                np.save(temporary, evaluation.detections, allow_pickle=False)
            if stored:
                stored.put_file(path)

        self._detections = run_in_thread(write, "detections")

    def await_detections(self) -> None:
        """Wait until the best epoch's detections are stored. A failure is a warning: they only serve plots."""
        pending, self._detections = self._detections, None
        if pending is None:
            return
        self._context.activity.enter("saving")
        try:
            pending.result(WRITE_SECONDS)
        except OSError as error:  # a TimeoutError is one
            self._emit(WarningEvent(message=f"{DETECTIONS_FILE} could not be written: {error}"))
        self._context.activity.enter("computing")

    def close(self) -> None:
        """Wait until everything is on storage, and close the lock's file."""
        with contextlib.ExitStack() as all_of_these:  # from the last one to the first, also if one of them raises
            all_of_these.callback(self.saver.close)
            all_of_these.callback(self.await_detections)
            with contextlib.suppress(TrainingError):  # already reported as a warning, and not the reason for this end
                self.wait()
