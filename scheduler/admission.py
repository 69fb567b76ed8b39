"""Who may join a running batch: the admission policy and the fixed watermark.

The scheduler itself checks that blocks exist. A policy only *restrains*: it is asked when a
waiting or preempted request would fit and something is already running or scheduled in this
step. An idle engine therefore admits anything that fits, whatever the policy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from scheduler.config import SchedulerConfig
    from scheduler.request import Request
    from scheduler.scheduler import Scheduler


class AdmissionPolicy(Protocol):
    """Decides whether one more request joins the batch, and hears what became of it.

    Every method is called from the scheduler's thread. A policy reads the scheduler's slot
    arrays (`running`, `num_tokens`, `num_computed`, `num_blocks_held`, `prompt_lens`,
    `max_total`, `slot_requests`), which already include growth and admissions of this step,
    and must not change them.
    """

    def admits(
        self,
        scheduler: Scheduler,
        request: Request,
        *,
        num_known_tokens: int,
        num_cached_tokens: int,
        num_new_blocks: int,
        num_free_blocks: int,
    ) -> bool:
        """Whether `request` may take its blocks now; refusing leaves it at the queue's head.

        Args:
          scheduler: its arrays and pool, to be read only.
          request: status WAITING or PREEMPTED.
          num_known_tokens: prompt and generated tokens.
          num_cached_tokens: how many of them the prefix cache holds (need not be computed).
          num_new_blocks: blocks it would take out of the free ones: for the whole known sequence
            under `reserve_full_sequence`, else for this step's chunk; hit blocks that nobody
            references are among them.
          num_free_blocks: blocks it may take from; at least num_new_blocks.
        """
        ...

    def on_admitted(self, scheduler: Scheduler, request: Request) -> None:
        """`request` joined the batch (fresh, or resumed if request.num_preemptions > 0)."""
        ...

    def on_preempted(self, scheduler: Scheduler, request: Request) -> None:
        """`request` lost its blocks and waits again."""
        ...

    def on_finished(self, scheduler: Scheduler, request: Request) -> None:
        """`request` ended (request.status says how, num_output_tokens how long it was)."""
        ...

    def on_step(
        self,
        step_seconds: float,
        num_prefill_tokens: int,
        num_decodes: int,
        context_tokens: int,
    ) -> None:
        """One step took `step_seconds`; reported through `Scheduler.observe_step`.

        Args:
          step_seconds: duration of the step on the device or in the model of it.
          num_prefill_tokens: tokens of rows that are not decodes.
          num_decodes: decoding rows.
          context_tokens: context length summed over the decoding rows.
        """
        ...


class FixedWatermark:
    """Keeps `watermark_blocks` free of admissions: growth of running requests may use them.

    Equality admits: the request joins if num_new_blocks + watermark_blocks <= num_free_blocks.
    """

    def __init__(self, watermark_blocks: int) -> None:
        self.watermark_blocks = watermark_blocks

    def admits(
        self,
        scheduler: Scheduler,
        request: Request,
        *,
        num_known_tokens: int,
        num_cached_tokens: int,
        num_new_blocks: int,
        num_free_blocks: int,
    ) -> bool:
        return num_new_blocks + self.watermark_blocks <= num_free_blocks

    def on_admitted(self, scheduler: Scheduler, request: Request) -> None:
        pass

    def on_preempted(self, scheduler: Scheduler, request: Request) -> None:
        pass

    def on_finished(self, scheduler: Scheduler, request: Request) -> None:
        pass

    def on_step(
        self,
        step_seconds: float,
        num_prefill_tokens: int,
        num_decodes: int,
        context_tokens: int,
    ) -> None:
        pass


def make_admission_policy(config: SchedulerConfig) -> AdmissionPolicy:
    """The policy that `config.watermark` names: a fixed reserve, or break-even for "auto"."""
    if config.watermark == "auto":
        # Imported here: it is larger than the rest and most schedulers do not need it.
        from scheduler.auto_admission import BreakEvenAdmission

        return BreakEvenAdmission(config)
    return FixedWatermark(config.watermark_blocks)


__all__ = ["AdmissionPolicy", "FixedWatermark", "make_admission_policy"]
