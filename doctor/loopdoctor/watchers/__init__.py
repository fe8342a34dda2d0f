"""The questions that are asked of what the eye sees (eye.py), one file each: what becomes of a tensor on its way.

A watcher is told of a call where the function is one of those with which its question begins, or where it knows
something of a tensor that is given. It keeps what it knows of tensors in `Known`, and writes what it found into the
evidence, by step. A check decides afterwards whether it is a fault.

Footgun: a watcher runs inside the user's step. What it asks of a tensor's numbers costs time in each of three steps.
"""

from loopdoctor.watchers.adapted import Adapted
from loopdoctor.watchers.attacks import Attacks
from loopdoctor.watchers.attention_dropouts import AttentionDropouts
from loopdoctor.watchers.averages import Averages
from loopdoctor.watchers.axes import Axes
from loopdoctor.watchers.blanks import Blanks
from loopdoctor.watchers.both_sides import BothSides
from loopdoctor.watchers.class_axis import ClassAxis
from loopdoctor.watchers.coarse_averages import CoarseAverages
from loopdoctor.watchers.cosines import Cosines
from loopdoctor.watchers.crops import Crops
from loopdoctor.watchers.crossed_maps import CrossedMaps
from loopdoctor.watchers.crossed_rows import CrossedRows
from loopdoctor.watchers.cut_off import CutOff
from loopdoctor.watchers.dead_terms import DeadTerms
from loopdoctor.watchers.detached_terms import DetachedTerms
from loopdoctor.watchers.divergences import Divergences
from loopdoctor.watchers.divergences_per_class import DivergencesPerClass
from loopdoctor.watchers.drawn_anew import DrawnAnew
from loopdoctor.watchers.dropouts import Dropouts
from loopdoctor.watchers.dropped import Dropped
from loopdoctor.watchers.echoed_series import EchoedSeries
from loopdoctor.watchers.endings import Endings
from loopdoctor.watchers.ends_hidden import EndsHidden
from loopdoctor.watchers.ends_of_episodes import EndsOfEpisodes
from loopdoctor.watchers.filled_labels import FilledLabels
from loopdoctor.watchers.growing_averages import GrowingAverages
from loopdoctor.watchers.ignored_labels import IgnoredLabels
from loopdoctor.watchers.laid_across import LaidAcross
from loopdoctor.watchers.levels_across import LevelsAcross
from loopdoctor.watchers.lone_parameters import LoneParameters
from loopdoctor.watchers.loss_graphs import LossGraphs
from loopdoctor.watchers.masked_pixels import MaskedPixels
from loopdoctor.watchers.masked_targets import MaskedTargets
from loopdoctor.watchers.masks import Masks
from loopdoctor.watchers.mirrored import Mirrored
from loopdoctor.watchers.moved_rows import MovedRows
from loopdoctor.watchers.never_left import NeverLeft
from loopdoctor.watchers.noisy_targets import NoisyTargets
from loopdoctor.watchers.one_sided_judges import OneSidedJudges
from loopdoctor.watchers.outer_products import OuterProducts
from loopdoctor.watchers.over_batch import OverBatch
from loopdoctor.watchers.overlaps import Overlaps
from loopdoctor.watchers.own_targets import OwnTargets
from loopdoctor.watchers.padded_divergences import PaddedDivergences
from loopdoctor.watchers.picked_across import PickedAcross
from loopdoctor.watchers.places_run_on import PlacesRunOn
from loopdoctor.watchers.pooled import Pooled
from loopdoctor.watchers.ratios import Ratios
from loopdoctor.watchers.rises_alone import RisesAlone
from loopdoctor.watchers.rounded_weights import RoundedWeights
from loopdoctor.watchers.routers import Routers
from loopdoctor.watchers.row_slopes import RowSlopes
from loopdoctor.watchers.rows_first import RowsFirst
from loopdoctor.watchers.same_lists import SameLists
from loopdoctor.watchers.same_margins import SameMargins
from loopdoctor.watchers.same_scores import SameScores
from loopdoctor.watchers.sampled_actions import SampledActions
from loopdoctor.watchers.skipped_losses import SkippedLosses
from loopdoctor.watchers.slices_written import SlicesWritten
from loopdoctor.watchers.slopes import Slopes
from loopdoctor.watchers.soft_targets import SoftTargets
from loopdoctor.watchers.spreads import Spreads
from loopdoctor.watchers.stored import Stored
from loopdoctor.watchers.taken_gradients import TakenGradients
from loopdoctor.watchers.terms_without_slope import TermsWithoutSlope
from loopdoctor.watchers.time_first import TimeFirst
from loopdoctor.watchers.told_tokens import ToldTokens
from loopdoctor.watchers.weights_as_numbers import WeightsAsNumbers
from loopdoctor.watchers.zeros_added import ZerosAdded

ALL = (
    Dropped,
    Slopes,
    Axes,
    Masks,
    Ratios,
    Cosines,
    Divergences,
    Averages,
    Spreads,
    Dropouts,
    AttentionDropouts,
    Endings,
    Overlaps,
    BothSides,
    OuterProducts,
    LossGraphs,
    MovedRows,
    SampledActions,
    EndsOfEpisodes,
    ZerosAdded,
    ClassAxis,
    EchoedSeries,
    PickedAcross,
    RisesAlone,
    SoftTargets,
    Stored,
    SlicesWritten,
    EndsHidden,
    Blanks,
    DeadTerms,
    Adapted,
    Mirrored,
    Attacks,
    DrawnAnew,
    WeightsAsNumbers,
    RoundedWeights,
    PaddedDivergences,
    CrossedMaps,
    CrossedRows,
    CutOff,
    NeverLeft,
    SkippedLosses,
    OverBatch,
    OwnTargets,
    CoarseAverages,
    LaidAcross,
    Pooled,
    RowsFirst,
    IgnoredLabels,
    TakenGradients,
    DivergencesPerClass,
    RowSlopes,
    FilledLabels,
    TermsWithoutSlope,
    Crops,
    SameScores,
    SameLists,
    SameMargins,
    ToldTokens,
    NoisyTargets,
    MaskedPixels,
    GrowingAverages,
    LevelsAcross,
    DetachedTerms,
    LoneParameters,
    MaskedTargets,
    OneSidedJudges,
    TimeFirst,
    PlacesRunOn,
    Routers,
)
