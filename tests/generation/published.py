"""From the arguments of published samplers to the settings that reproduce them."""

from __future__ import annotations

from typing import Any

from dare_lightning.generation.lengths import Daedal, RhoEos
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
        "varlen": _variable,
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
    kinds = set(case["forward_kinds"])
    cache = "dual" if "block" in kinds or args.pop("dual_cache", False) else "prefix" if "suffix" in kinds else None
    args.pop("dual_cache", None)
    if cache is not None:
        args["cache"] = cache
    if "alg" in args and cache is not None:
        # Any other name than confidence_threshold ranks by entropy.
        args |= {"first_column_first": True, "score_from": "sampled"}
        eps = args.pop("eps", 1e-3)
        if args.pop("alg") != "confidence_threshold":
            return args | {"remasking": "entropy", "schedule": DreamSchedule(eps)}
        return args | {"schedule": ConfidenceThreshold(args.pop("threshold", 0.9)), "steps": None}
    if args.get("alg", "confidence_threshold") != "confidence_threshold":
        args.pop("threshold", None)
        return _dream(args, case)
    threshold, factor = args.pop("threshold", None), args.pop("factor", None)
    if args.pop("alg", None) == "confidence_threshold":
        return args | {"schedule": QuotaThreshold(0.9 if threshold is None else threshold), "score_from": "sampled"}
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


def _variable(args: dict[str, Any], case: dict[str, Any]) -> dict[str, Any]:
    """DAEDAL and rho-EOS."""
    common = {
        "initial": args.pop("initial_gen_length", 64),
        "expansion": args.pop("expansion_factor", 8),
        "window": args.pop("eos_check_tokens", 32),
    }
    low = args.pop("low_conf_threshold", 0.1)
    sufficient = args.pop("eos_confidence_threshold", 0.5)
    complete = args.pop("expand_eos_confidence_threshold", 0.9)
    found = {
        "steps": None,
        "max_new_tokens": args.pop("max_gen_length", 2048),
        "block_length": args.pop("block_length", 32),
        "schedule": ConfidenceThreshold(args.pop("high_conf_threshold", 0.9)),
    }
    if "rho" in case["upstream"]:
        low, high = args.pop("low_density_threshold", 0.4), args.pop("high_density_threshold", 0.6)
        growth = args.pop("scheduler", "exp")
        return args | found | {"lengths": RhoEos(**common, growth=growth, low=low, high=high, density="tail")}
    lengths = Daedal(**common, sufficient=sufficient, complete=complete, unsure=low)
    return args | found | {"lengths": lengths}
