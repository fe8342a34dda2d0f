"""The dominance graph: which fault explains which other finding, so that a report names one cause and not 25 effects.

An entry `cause: effects` says that whoever has the cause will see the effects as well, so they are folded under it.
The order of the entries is the order of roots in a report: what makes a run senseless comes before what makes it worse.

Footgun: a graph that folds too much hides a second fault. An effect is folded only when the cause makes it certain or
nearly so; two faults that merely may occur together both stay roots.
"""

from train_doctor.finding import SEVERITIES, Finding

CAUSES: dict[str, tuple[str, ...]] = {
    "D9": ("N5", "N17", "B4", "F5", "B6", "N15", "N3", "F4"),
    "N25": ("N17", "B4", "F5", "N3", "N5", "S7"),
    "F5": ("N17", "B4", "N15", "F3", "N5", "N3", "N7", "B6"),
    "S10": ("B8", "F1", "B1", "B2", "B3", "N3", "S1"),
    "S8": ("S1", "S2", "S3", "F1"),
    "S1": ("B8", "S2", "S3", "F1", "B1", "B2", "B3", "N3", "N20", "N2", "N8", "N14"),
    "S6": ("F1", "B1", "F9"),
    "F9": ("F1",),
    "F1": ("B8", "B1", "B2", "B3", "N2", "N3", "N8", "N14", "N20", "F2"),
    "S2": ("S3", "N3", "N20", "N14", "B8"),
    "S9": ("S3", "N13"),
    "S3": ("B8", "S4", "N1", "N3", "N20", "N14", "N12", "F8"),
    "S16": ("F1", "B1", "B2", "B3", "N3", "N20", "N14", "S3"),
    "N20": ("B1", "B2", "B3", "N3"),  # tried, so surer than a missing gradient
    "S7": ("N15", "N7", "B5"),
    "N21": ("B1",),
    "F14": ("F16", "F17", "N17", "F3", "F5", "B2", "B3", "N2", "N3"),
    "F7": ("N14", "F8", "S12", "F6"),
    "N2": ("B8", "B1", "B2", "B3", "N3", "N8", "N14", "N20"),
    "F2": ("B1", "B7"),
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
    "N7": ("B6", "N5"),
    "N8": ("B6",),
    "N1": ("B6", "N5", "N17", "N6"),
    "N6": ("B6", "N5", "F3"),
    "N9": ("N11", "N5", "N3"),
    "N11": ("N3", "N5"),
    "N4": ("N3", "N5", "N11"),
    "S13": ("N5", "N5b"),
    "N5b": ("N5",),
    "N5": ("B6", "N17", "F5"),
    "N17": ("B4", "N5", "N3", "N15"),
    "B4": ("N15",),
    "B5": ("N3", "B2", "B3"),
    "S11": ("N16",),
    "S4": (),
    "S20": ("B7",),
    "B8": ("N3", "F8"),
    "S21": ("F12",),
    "N26": ("N5",),
    "N27": (),
    "F22": ("B1",),
    "D10": (),
    "N28": ("N12",),
    "F23": (),
    "F24": (),
    "F25": ("F2",),
    "F26": ("N5", "N5b"),
    "F28": ("N12",),
    "F29": (),
    "D11": (),
    "F27": ("N3", "N5", "N5b", "B7"),
    "F30": (),
    "F31": (),
    "F32": (),
    "F33": (),
    "F34": ("B7",),
    "F35": ("B3",),
    "F41": (),
    "F43": (),
    "F44": ("F20", "N17"),
    "N30": ("F5", "N17", "B4", "N5", "N7", "N15", "F3"),
    "S24": (),
    "S25": (),
    "F42": ("B6", "N5"),
    "S26": ("F52",),
    "S27": (),
    "F62": (),
    "F63": ("F62",),
    "F71": ("F20", "N17", "N5"),
    "F72": (),
    "F73": (),
    "F64": (),
    "F65": (),
    "F66": ("N17",),
    "F67": (),
    "F68": (),
    "F69": (),
    "F70": ("F20", "N5"),
    "F74": (),
    "F75": ("F20", "N5"),
    "F76": (),
    "F77": (),
    "F78": (),
    "F79": (),
    "F80": (),
    "F81": (),
    "F82": ("F20", "N17", "N5"),
    "F83": (),
    "F84": (),
    "F85": (),
    "F86": (),
    "F87": (),
    "F88": ("F20", "N5"),
    "F89": (),
    "F90": (),
    "F91": (),
    "F92": (),
    "F93": ("B1", "B7"),
    "F94": (),
    "N36": (),
    "D22": (),
    "D23": (),
    "S33": (),
    "S34": (),
    "S37": ("B7",),
    "S38": ("B7", "B1"),
    "S39": (),
    "N37": ("B1", "B3"),
    "N38": (),
    "S35": (),
    "S36": ("F65",),
    "D20": (),
    "D21": (),
    "D16": ("F51",),
    "D17": ("B3", "F20", "F52"),
    "D18": (),
    "D19": (),
    "S32": (),
    "N34": (),
    "N35": ("N3", "B8"),
    "F60": (),
    "F61": ("N5", "F4"),
    "D15": (),
    "F54": (),
    "F55": (),
    "F56": (),
    "F57": (),
    "F58": (),
    "F59": (),
    "S31": (),
    "D14": (),
    "F45": (),
    "F46": ("N5",),
    "F47": (),
    "F48": (),
    "F49": ("N17", "N5", "B6"),
    "F50": (),
    "F51": (),
    "F52": ("B3", "B7", "N3"),
    "F53": (),
    "S28": (),
    "S29": (),
    "S30": (),
    "N31": (),
    "N33": ("N5",),
    "N32": ("N9", "N11"),
    "F4": ("N5", "B6"),
    "D12": (),
    "D13": (),
    "N29": (),
    "F36": (),
    "F37": (),
    "F38": ("B1", "B7"),
    "F39": (),
    "F40": ("N3",),
    "S22": (),
    "S23": (),
    "S18": ("S3",),
    "S19": ("S1", "S2", "S3", "F1", "N3"),
    "N24": (),
    "N14": ("B3",),
    "L1": ("L2", "L3", "L5"),  # of a log alone
    "L2": ("L4", "L5"),
    "L3": ("L5",),
}


def order(findings: list[Finding]) -> list[Finding]:
    """Roots first, errors before the rest, each followed by what it explains."""
    ranks = {check: rank for rank, check in enumerate(CAUSES)}
    by_check = {f.check: f for f in findings}
    explained: dict[str, str] = {}
    for cause in sorted(by_check, key=lambda check: ranks.get(check, len(ranks))):
        for effect in CAUSES.get(cause, ()):
            if effect in by_check and effect not in explained and not _explains(effect, cause, explained):
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
