"""The rules for training that the write-up on spiking distillation gives, each with the pitfall
that tried it.

Every rule was run as it stands and as it should be, in the notebook that the table names. `rows` is
that table.

Footgun: a rule that is right for one device or one version may be wrong for another. Each verdict
names its versions.
"""

from lessons.pitfalls import pitfall

RULES = {
    "teacher in inference mode": ("P33", "03"),
    "what autocast lifts to fp32": ("P32", "03"),
    "scale, clip, unscale": ("P27", "03"),
    "warm-up and cosine": ("P34", "03"),
    "divide by the micro-batches": ("P36", "04"),
    "no_sync": ("P37", "04"),
    "a complete checkpoint": ("P38", "04"),
    "rollback": ("P39", "04"),
    "hooks for nan": ("P40", "04"),
    "the first loss": ("P44", "04"),
    "workers of the loader": ("P45", "04"),
    "atomic checkpoints": ("P48", "04"),
    "a checkpointed block": ("P20", "02"),
}


def rows() -> list[dict]:
    """Return a row per rule: what came out when it was run, what to do instead, and where."""
    shown = {rule: pitfall(number) for rule, (number, _) in RULES.items()}
    return [
        {
            "rule": rule,
            "what came out": f"{p.id} {p.title}",
            "instead": p.fix,
            "notebook": RULES[rule][1],
        }
        for rule, p in shown.items()
    ]
