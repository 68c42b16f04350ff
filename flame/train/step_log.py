"""What is kept of steps until one is logged, and the writing of that one: metrics.jsonl, loggers, console."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from flame.sampling.history import METRICS
from flame.train.console import tell_step, use_color
from flame.train.devices import peak_flops
from flame.train.interval import IntervalClock, SaveTimes
from flame.train.log import log
from flame.train.losses import MAX_STEPS_KEPT, StepLosses, gather_losses, spike_rule_of, spike_told
from flame.train.metrics import MetricsFile, StepMetrics, memory_use
from flame.train.setup import Run
from flame.train.step import StepDone
from flame.train.train_state import TrainState


class StepLog:
    """Every rank has one and calls it alike; `log_elsewhere` is given every line of metrics.jsonl."""

    def __init__(self, run: Run, log_elsewhere: Callable[[Mapping[str, Any]], None]) -> None:
        options, folder, world = run.config.metrics, run.config.job.dump_folder, run.world
        self._run, self._log_elsewhere = run, log_elsewhere
        self._file = MetricsFile(folder / METRICS if world.is_main else None)
        self._color = use_color(disabled=options.disable_color_printing)
        self._source_names = [source.name for source in run.data.mixture.sources]
        self._peak_flops = None if run.flops is None else peak_flops(world.device, options.peak_tflops)
        self._spike_rule = spike_rule_of(folder, world)
        self._kept = deque[StepLosses](maxlen=MAX_STEPS_KEPT)
        self._load_seconds = run.load_seconds
        self.clock = IntervalClock()

    def count(self, done: StepDone, *, wait_seconds: float, flops: int) -> None:
        """Keep what the next logged step needs of this one; `flops` are those of all ranks."""
        self._kept.append(done.losses)
        self.clock.count_step(
            num_tokens=self._run.geometry.tokens_per_step,
            wait_seconds=wait_seconds,
            flops=None if self._run.flops is None else flops,
        )

    def write(
        self,
        state: TrainState,
        done: StepDone,
        *,
        saves: SaveTimes,
        validation: Mapping[str, Mapping[str, float | None]],
        keep: bool,
    ) -> None:
        """Log the step that ends at `state`; `keep` leaves its line on a terminal."""
        run = self._run
        losses = gather_losses(self._kept, self._spike_rule, run.geometry, len(self._source_names), run.world)
        self._kept.clear()
        line = StepMetrics(
            step=state.step,
            consumed_samples=state.consumed_samples,
            consumed_tokens=state.consumed_tokens,
            segment=run.segment.number,
            stage=run.sampler.stage_at(state.consumed_samples - 1),
            losses=losses,
            source_names=self._source_names,
            lr=done.lr,
            grad_norm=float(done.grad_norm),
            skipped_steps=state.skipped_steps,
            interval=self.clock.next_interval(),
            world_size=run.world.size,
            peak_flops=self._peak_flops,
            memory=memory_use(run.world.device),
            saves=saves,
            load_seconds=self._load_seconds,
            validation=validation,
        ).to_json()
        self._load_seconds = None  # told once
        self._file.write(line)
        self._log_elsewhere(line)
        elapsed = state.elapsed_seconds
        tell_step(line, total_steps=run.total_steps, elapsed_seconds=elapsed, color=self._color, keep=keep)
        for spike in losses.spikes:
            log.info(spike_told(spike, run.config.job.dump_folder))
