"""The dominance graph: which fault explains which other finding, so that a report names one cause
and not 25 effects.

An entry `cause: effects` says that whoever has the cause will see the effects as well, so they are
folded under it. The order of the entries is the order of roots in a report: what makes a run
senseless comes before what makes it worse.

Footgun: a graph that folds too much hides a second fault. An effect is folded only when the cause
makes it certain or nearly so; two faults that merely may occur together both stay roots.
"""

from loopdoctor.finding import SEVERITIES, Finding

CAUSES: dict[str, tuple[str, ...]] = {
    "R1": (),
    "N25": ("N17", "B4", "F5", "N3", "N5", "S7"),
    "F5": ("N17", "B4", "N15", "F3", "N5", "N3", "N7"),
    "S10": ("B8", "F1", "B1", "B2", "B3", "N3", "S1"),
    "S8": ("S1", "S2", "S3", "F1"),
    "S1": ("B8", "S2", "S3", "F1", "B1", "B2", "B3", "N3", "N2", "N8", "N14"),
    "F9": ("F1",),
    "F1": ("B8", "B1", "B2", "B3", "N2", "N3", "N8", "N14", "F2"),
    "S2": ("S3", "N3", "N14", "B8"),
    "S9": ("S3",),
    "S3": ("B8", "S4", "N1", "N3", "N14", "N12"),
    "S51": ("S22",),
    "S7": ("N15", "N7", "B5"),
    "F10": (),
    "N21": ("B1",),
    "F14": ("F16", "F17", "N17", "F3", "F5", "B2", "B3", "N2", "N3"),
    "F7": ("N14", "S12", "F6"),
    "N2": ("B8", "B1", "B2", "B3", "N3", "N8", "N14"),
    "F2": ("B1", "B7"),
    "N9": ("N11", "N5", "N3"),
    "B1": ("B2", "B3", "N3", "N8"),
    "B3": ("B2", "N3"),
    "F17": ("F3",),
    "F15": ("F3",),
    "F20": ("N17", "F5", "B4", "N15", "N3"),
    "F21": ("B3", "N3"),
    "F3": ("F4", "N6"),
    "F12": ("F10", "F11"),
    "F11": ("F4",),
    "F6": ("S12",),
    "N7": ("N5",),
    "N8": (),
    "N1": ("N5", "N17", "N6"),
    "N6": ("N5", "F3"),
    "N11": ("N3", "N5"),
    "B5": ("N3", "B2", "B3"),
    "M1": (),
    "N4": ("N3", "N5", "N11"),
    "S13": ("N5", "N5b"),
    "N5b": ("N5",),
    "N5": ("N17", "F5"),
    "N17": ("B4", "N5", "N3", "N15"),
    "B4": ("N15",),
    "S11": ("N16",),
    "S4": (),
    "S20": ("B7",),
    "B8": ("N3", "N8"),
    "S21": ("F12",),
    "N27": (),
    "F22": ("B1",),
    "N28": ("N12",),
    "F25": ("F2",),
    "F30": ("F11",),
    "F33": ("F11",),
    "F34": ("B7", "F11"),
    "S24": (),
    "S25": (),
    "F66": ("N17",),
    "F81": (),
    "F89": (),
    "S33": ("F11",),
    "S37": ("B7",),
    "D19": (),
    "F56": (),
    "F57": (),
    "D14": (),
    "S30": (),
    "F4": ("N5",),
    "D13": (),
    "N29": (),
    "F40": ("N3",),
    "S22": (),
    "S18": ("S3",),
    "S19": ("S1", "S2", "S3", "F1", "N3"),
    "N24": ("N3", "S20", "B7"),
    "N14": ("B3",),
    "M2": ("B3", "N3"),
}

# of a log alone (logs.py)
OF_A_LOG: dict[str, tuple[str, ...]] = {
    "S10": ("L5", "L6"),
    "S1": ("L5", "L6"),
    "S2": ("L5", "L6"),
    "L1": ("L2", "L3", "L5", "N15", "N17", "B4"),
    "L2": ("L4", "L5", "N15", "N17", "B4"),
    "L3": ("L5",),
    "L6": ("L5",),
}


def order(findings: list[Finding]) -> list[Finding]:
    """Roots first, errors before the rest, each followed by what it explains."""
    ranks = {check: rank for rank, check in enumerate({**CAUSES, **OF_A_LOG})}
    by_check = {f.check: f for f in findings}
    explained: dict[str, str] = {}
    for cause in sorted(by_check, key=lambda check: ranks.get(check, len(ranks))):
        for effect in CAUSES.get(cause, ()) + OF_A_LOG.get(cause, ()):
            if (
                effect in by_check
                and effect not in explained
                and not _explains(effect, cause, explained)
            ):
                explained[effect] = cause
    roots = [f for f in findings if f.check not in explained]
    roots.sort(key=lambda f: (SEVERITIES.index(f.severity), ranks.get(f.check, len(ranks))))
    effects: dict[str, list[Finding]] = {}
    for effect, cause in explained.items():
        while cause in explained:  # an effect of an effect belongs to the root
            cause = explained[cause]
        effects.setdefault(cause, []).append(by_check[effect]._replace(because=cause))
    return [line for root in roots for line in (root, *effects.get(root.check, []))]


def _explains(cause: str, effect: str, explained: dict[str, str]) -> bool:
    """Whether `cause` already stands above `effect`: the graph must stay without circles."""
    while effect in explained:
        effect = explained[effect]
        if effect == cause:
            return True
    return False
