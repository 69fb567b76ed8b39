"""Continuous batching over a paged KV cache, with a watermark. Needs numpy only."""

from scheduler.admission import AdmissionPolicy, FixedWatermark, make_admission_policy
from scheduler.block_pool import NULL_BLOCK, BlockPool
from scheduler.config import SchedulerConfig, Watermark, check_watermark
from scheduler.kv_cache import KVCacheManager
from scheduler.output import KVLoad, Preemption, SchedulerOutput, StepResult
from scheduler.request import Request, RequestStatus
from scheduler.scheduler import Scheduler
from scheduler.state import KVLoader
from scheduler.stats import SchedulerStats
from scheduler.waiting import QueueFullError

__all__ = [
    "NULL_BLOCK",
    "AdmissionPolicy",
    "BlockPool",
    "FixedWatermark",
    "KVCacheManager",
    "KVLoad",
    "KVLoader",
    "Preemption",
    "QueueFullError",
    "Request",
    "RequestStatus",
    "Scheduler",
    "SchedulerConfig",
    "SchedulerOutput",
    "SchedulerStats",
    "StepResult",
    "Watermark",
    "check_watermark",
    "make_admission_policy",
]
