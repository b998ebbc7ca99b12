"""MMLU: multiple-choice questions of 57 subjects."""

from __future__ import annotations

from pathlib import Path

from dare_lightning.evaluation.benchmark import Benchmark, DataFile, Description

_SOURCE = "https://people.eecs.berkeley.edu/~hendrycks/data.tar"
_LETTERS = "ABCD"
SUBJECTS = [
    "abstract_algebra",
    "anatomy",
    "astronomy",
    "business_ethics",
    "clinical_knowledge",
    "college_biology",
    "college_chemistry",
    "college_computer_science",
    "college_mathematics",
    "college_medicine",
    "college_physics",
    "computer_security",
    "conceptual_physics",
    "econometrics",
    "electrical_engineering",
    "elementary_mathematics",
    "formal_logic",
    "global_facts",
    "high_school_biology",
    "high_school_chemistry",
    "high_school_computer_science",
    "high_school_european_history",
    "high_school_geography",
    "high_school_government_and_politics",
    "high_school_macroeconomics",
    "high_school_mathematics",
    "high_school_microeconomics",
    "high_school_physics",
    "high_school_psychology",
    "high_school_statistics",
    "high_school_us_history",
    "high_school_world_history",
    "human_aging",
    "human_sexuality",
    "international_law",
    "jurisprudence",
    "logical_fallacies",
    "machine_learning",
    "management",
    "marketing",
    "medical_genetics",
    "miscellaneous",
    "moral_disputes",
    "moral_scenarios",
    "nutrition",
    "philosophy",
    "prehistory",
    "professional_accounting",
    "professional_law",
    "professional_medicine",
    "professional_psychology",
    "public_relations",
    "security_studies",
    "sociology",
    "us_foreign_policy",
    "virology",
    "world_religions",
]


class MMLU(Benchmark):
    """Five answered questions of the subject, then the question; a letter is the answer.

    In likelihood mode the letters are compared as answers to the same conversation: OpenCompass's own configuration for
    likelihoods writes question and letter as one text, in which the answer cannot be told from the question.
    """

    name = "mmlu"
    title = "MMLU"
    default_config = "mmlu/mmlu_gen_a484b3"
    likelihood_config = "mmlu/mmlu_gen_a484b3"
    subset_key = "name"

    def required_files(self) -> tuple[DataFile, ...]:
        """The questions and the answered examples of each subject."""
        parts = [f"{split}/{name}_{split}.csv" for name in self.subsets or SUBJECTS for split in ("dev", "test")]
        return tuple(DataFile(f"data/mmlu/{part}", _SOURCE) for part in parts)

    def adapted(self, descriptions: list[Description], folder: Path) -> list[Description]:
        """Read from the given folder; the letters as given answers in likelihood mode."""
        located = [description | {"path": str(folder / "data/mmlu")} for description in descriptions]
        return [_with_given_letters(d) for d in located] if self.mode == "likelihood" else located


def _with_given_letters(description: Description) -> Description:
    from opencompass.openicl.icl_inferencer import PPLInferencer
    from opencompass.openicl.icl_prompt_template import PromptTemplate

    infer = description["infer_cfg"]
    asked = infer["prompt_template"]["template"]["round"]
    template = {letter: {"begin": "</E>", "round": [*asked, {"role": "BOT", "prompt": letter}]} for letter in _LETTERS}
    answered = infer["ice_template"]["template"]["round"]
    examples = {letter: {"round": answered} for letter in _LETTERS}
    return description | {
        "infer_cfg": {
            "ice_template": {"type": PromptTemplate, "template": examples},
            "prompt_template": {"type": PromptTemplate, "template": template, "ice_token": "</E>"},
            "retriever": infer["retriever"],
            "inferencer": {"type": PPLInferencer},
        },
        "eval_cfg": {"evaluator": description["eval_cfg"]["evaluator"]},
    }
