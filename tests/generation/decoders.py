"""One setting of each decoder, for tests of what they all keep."""

from __future__ import annotations

from typing import Any

from dare_lightning.generation.schedule import AscendingSchedule, DreamSchedule, MaskRatioSchedule, OriginSchedule
from dare_lightning.generation.scores import EndRejection, EndsLast
from dare_lightning.generation.threshold import ConfidenceFactor, ConfidenceThreshold, QuotaThreshold

SAMPLED: dict[str, Any] = {"score_from": "sampled", "top_p": 0.9, "top_k": 20}

# Once written, a token stays.
MONOTONE: dict[str, dict[str, Any]] = {
    "even": {"steps": 8, "block_length": 8},
    "random": {"steps": 8, "remasking": "random"},
    "left_to_right": {"steps": 16, "block_length": 1},
    "threshold": {"steps": None, "block_length": 8, "schedule": ConfidenceThreshold(0.3)},
    "factor": {"steps": None, "block_length": 8, "schedule": ConfidenceFactor(1.5)},
    "quota": {"steps": 4, "schedule": QuotaThreshold(0.3)},
    "dream_maskgit": {"steps": 16, "schedule": DreamSchedule(), **SAMPLED},
    "dream_margin": {"steps": 6, "schedule": DreamSchedule(), "remasking": "topk_margin", **SAMPLED},
    "dream_entropy": {"steps": 24, "schedule": DreamSchedule(0.1), "remasking": "entropy", **SAMPLED},
    "dream_drawn_order": {"steps": 6, "schedule": DreamSchedule(), "order_temperature": 0.3, **SAMPLED},
    "dream_origin": {"steps": 8, "schedule": OriginSchedule(), "remasking": "random", "top_k": 20},
    "eoser": {"steps": 8, "block_length": 8, "ends": EndRejection()},
    "ascending": {"steps": 4, "schedule": AscendingSchedule(2), "ends": EndRejection(0.01, ramp="doubling")},
    "ends_last": {"steps": 8, "block_length": 8, "ends": EndsLast()},
    "cosine": {"steps": 8, "schedule": MaskRatioSchedule("cosine")},
}
# Tokens may be hidden again.
REMASKING: dict[str, dict[str, Any]] = {
    "running": {"steps": 4, "block_length": 8, "running_confidence": True},
    "running_entropy": {
        "steps": 6,
        "running_confidence": True,
        "remasking": "entropy",
        "schedule": MaskRatioSchedule("cosine"),
        **SAMPLED,
    },
}
ALL = MONOTONE | REMASKING
