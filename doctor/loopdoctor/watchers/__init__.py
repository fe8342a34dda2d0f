"""The questions that are asked of what the eye sees (eye.py), one file each: what becomes of a
tensor on its way.

A watcher is told of a call where the function is one of those with which its question begins, or
where it knows something of a tensor that is given. It keeps what it knows of tensors in `Known`,
and writes what it found into the evidence, by step. A check decides afterwards whether it is a
fault.

Footgun: a watcher runs inside the user's step. What it asks of a tensor's numbers costs time in
each of three steps.
"""

from loopdoctor.watchers.axes.axes import Axes
from loopdoctor.watchers.axes.class_axis import ClassAxis
from loopdoctor.watchers.axes.crossed_maps import CrossedMaps
from loopdoctor.watchers.axes.crossed_rows import CrossedRows
from loopdoctor.watchers.axes.laid_across import LaidAcross
from loopdoctor.watchers.axes.levels_across import LevelsAcross
from loopdoctor.watchers.axes.outer_products import OuterProducts
from loopdoctor.watchers.axes.over_batch import OverBatch
from loopdoctor.watchers.axes.picked_across import PickedAcross
from loopdoctor.watchers.axes.rows_first import RowsFirst
from loopdoctor.watchers.axes.time_first import TimeFirst
from loopdoctor.watchers.gradients.attacks import Attacks
from loopdoctor.watchers.gradients.cut_off import CutOff
from loopdoctor.watchers.gradients.row_slopes import RowSlopes
from loopdoctor.watchers.gradients.sampled_actions import SampledActions
from loopdoctor.watchers.gradients.slopes import Slopes
from loopdoctor.watchers.gradients.taken_gradients import TakenGradients
from loopdoctor.watchers.inputs.crops import Crops
from loopdoctor.watchers.inputs.echoed_series import EchoedSeries
from loopdoctor.watchers.inputs.masked_pixels import MaskedPixels
from loopdoctor.watchers.inputs.mirrored import Mirrored
from loopdoctor.watchers.inputs.moved_rows import MovedRows
from loopdoctor.watchers.inputs.slices_written import SlicesWritten
from loopdoctor.watchers.inputs.stored import Stored
from loopdoctor.watchers.inputs.told_tokens import ToldTokens
from loopdoctor.watchers.layers.attention_dropouts import AttentionDropouts
from loopdoctor.watchers.layers.dropouts import Dropouts
from loopdoctor.watchers.layers.endings import Endings
from loopdoctor.watchers.layers.masks import Masks
from loopdoctor.watchers.layers.places_run_on import PlacesRunOn
from loopdoctor.watchers.layers.pooled import Pooled
from loopdoctor.watchers.losses.blanks import Blanks
from loopdoctor.watchers.losses.both_sides import BothSides
from loopdoctor.watchers.losses.cosines import Cosines
from loopdoctor.watchers.losses.dead_terms import DeadTerms
from loopdoctor.watchers.losses.detached_terms import DetachedTerms
from loopdoctor.watchers.losses.divergences import Divergences
from loopdoctor.watchers.losses.divergences_per_class import DivergencesPerClass
from loopdoctor.watchers.losses.ends_hidden import EndsHidden
from loopdoctor.watchers.losses.filled_labels import FilledLabels
from loopdoctor.watchers.losses.ignored_labels import IgnoredLabels
from loopdoctor.watchers.losses.loss_graphs import LossGraphs
from loopdoctor.watchers.losses.masked_targets import MaskedTargets
from loopdoctor.watchers.losses.noisy_targets import NoisyTargets
from loopdoctor.watchers.losses.one_sided_judges import OneSidedJudges
from loopdoctor.watchers.losses.overlaps import Overlaps
from loopdoctor.watchers.losses.own_targets import OwnTargets
from loopdoctor.watchers.losses.padded_divergences import PaddedDivergences
from loopdoctor.watchers.losses.ratios import Ratios
from loopdoctor.watchers.losses.rises_alone import RisesAlone
from loopdoctor.watchers.losses.same_lists import SameLists
from loopdoctor.watchers.losses.same_margins import SameMargins
from loopdoctor.watchers.losses.same_scores import SameScores
from loopdoctor.watchers.losses.skipped_losses import SkippedLosses
from loopdoctor.watchers.losses.soft_targets import SoftTargets
from loopdoctor.watchers.losses.spreads import Spreads
from loopdoctor.watchers.losses.terms_without_slope import TermsWithoutSlope
from loopdoctor.watchers.methods.ends_of_episodes import EndsOfEpisodes
from loopdoctor.watchers.methods.never_left import NeverLeft
from loopdoctor.watchers.methods.routers import Routers
from loopdoctor.watchers.weights.adapted import Adapted
from loopdoctor.watchers.weights.averages import Averages
from loopdoctor.watchers.weights.coarse_averages import CoarseAverages
from loopdoctor.watchers.weights.drawn_anew import DrawnAnew
from loopdoctor.watchers.weights.dropped import Dropped
from loopdoctor.watchers.weights.growing_averages import GrowingAverages
from loopdoctor.watchers.weights.lone_parameters import LoneParameters
from loopdoctor.watchers.weights.rounded_weights import RoundedWeights
from loopdoctor.watchers.weights.weights_as_numbers import WeightsAsNumbers
from loopdoctor.watchers.weights.zeros_added import ZerosAdded

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
