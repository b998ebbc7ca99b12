"""From the arguments of published samplers to the settings that reproduce them."""

from __future__ import annotations

from typing import Any

from dare_lightning.generation.schedule import (
    AscendingSchedule,
    DreamSchedule,
    MaskRatioSchedule,
    OriginSchedule,
)
from dare_lightning.generation.scores import EndRejection, EndsLast
from dare_lightning.generation.threshold import ConfidenceFactor, ConfidenceThreshold, QuotaThreshold

RENAMED = {
    "steps": "steps",
    "gen_length": "max_new_tokens",
    "max_new_tokens": "max_new_tokens",
    "block_length": "block_length",
    "temperature": "temperature",
    "cfg_scale": "cfg_scale",
    "remasking": "remasking",
    "logits_eos_inf": "suppress_eos",
    "confidence_eos_eot_inf": "defer_eos",
    "top_p": "top_p",
    "top_k": "top_k",
}


def settings_of(part: str, case: dict[str, Any]) -> dict[str, Any]:
    """Settings of the built-in backend for a golden case of this part."""
    args = dict(case["args"])
    translate = {
        "llada": lambda args, case: args,
        "dream": _dream,
        "fastdllm": _fast_dllm,
        "eoser-ass": _eoser_ass,
        "mdpo": _mdpo,
        "dare-cj": _dare_cj,
    }[part]
    found = {RENAMED.get(name, name): value for name, value in translate(args, case).items()}
    return {"early_stop": False, "eos_policy": "keep"} | found


def _dream(args: dict[str, Any], case: dict[str, Any]) -> dict[str, Any]:
    orders = {"maskgit_plus": "low_confidence", "topk_margin": "topk_margin", "entropy": "entropy", "origin": "random"}
    algorithm, eps = args.pop("alg"), args.pop("eps", 1e-3)
    args.pop("seed", None)
    if algorithm == "origin":
        return args | {"remasking": "random", "schedule": OriginSchedule(eps)}
    temperature = args.pop("alg_temp", None) or 0.0
    order = {"remasking": orders[algorithm], "score_from": "sampled", "order_temperature": temperature}
    return args | order | {"schedule": DreamSchedule(eps)}


def _fast_dllm(args: dict[str, Any], case: dict[str, Any]) -> dict[str, Any]:
    threshold, factor = args.pop("threshold", None), args.pop("factor", None)
    if args.pop("alg", None) == "confidence_threshold":
        return args | {"schedule": QuotaThreshold(threshold), "score_from": "sampled"}
    if threshold is not None:
        return args | {"schedule": ConfidenceThreshold(threshold), "steps": None}
    if factor is not None:
        return args | {"schedule": ConfidenceFactor(factor, accept_last_refused=True), "steps": None}
    return args


def _eoser_ass(args: dict[str, Any], case: dict[str, Any]) -> dict[str, Any]:
    function = case["function"].rpartition(":")[2]
    ascending = "ass" in function
    if ascending:
        args["schedule"] = AscendingSchedule(args.pop("block_num"))
    if "eoser" in function:
        low, high = args.pop("eos_min_gamma", 0.01 if ascending else 0.4), args.pop("eos_max_gamma", 1.0)
        args["ends"] = EndRejection(low, high, "doubling" if ascending else "linear", within_block=not ascending)
    return args


def _mdpo(args: dict[str, Any], case: dict[str, Any]) -> dict[str, Any]:
    orders = {"llada": "low_confidence", "topk_margin": "topk_margin", "entropy": "entropy", "random": "random"}
    args["remasking"] = orders[args.pop("conf_alg")]
    if args["remasking"] != "random":
        args["score_from"] = "sampled"
    return args | {
        "running_confidence": args.pop("rcr", False),
        "schedule": MaskRatioSchedule(args.pop("mode", "linear")),
    }


def _dare_cj(args: dict[str, Any], case: dict[str, Any]) -> dict[str, Any]:
    args.pop("step_merge", None)
    if args.pop("mode") == "eval":
        args["ends"] = EndsLast(contested=True)
    return args
