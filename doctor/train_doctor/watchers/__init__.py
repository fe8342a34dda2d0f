"""The questions that are asked of what the eye sees (eye.py), one file each: what becomes of a tensor on its way.

A watcher is told of a call where the function is one of those with which its question begins, or where it knows
something of a tensor that is given. It keeps what it knows of tensors in `Known`, and writes what it found into the
evidence, by step. A check decides afterwards whether it is a fault.

Footgun: a watcher runs inside the user's step. What it asks of a tensor's numbers costs time in each of three steps.
"""

from train_doctor.watchers.adapted import Adapted
from train_doctor.watchers.adversaries import Adversaries
from train_doctor.watchers.aims import Aims
from train_doctor.watchers.angles import Angles
from train_doctor.watchers.angles_elsewhere import AnglesElsewhere
from train_doctor.watchers.asked_twice import AskedTwice
from train_doctor.watchers.at_their_ends import AtTheirEnds
from train_doctor.watchers.attacks import Attacks
from train_doctor.watchers.attending import Attending
from train_doctor.watchers.attention_dropouts import AttentionDropouts
from train_doctor.watchers.averages import Averages
from train_doctor.watchers.axes import Axes
from train_doctor.watchers.background import Background
from train_doctor.watchers.bare_layers import BareLayers
from train_doctor.watchers.best_states import BestStates
from train_doctor.watchers.blanks import Blanks
from train_doctor.watchers.blended import Blended
from train_doctor.watchers.bootstraps import Bootstraps
from train_doctor.watchers.both_sides import BothSides
from train_doctor.watchers.box_centres import BoxCentres
from train_doctor.watchers.boxes import Boxes
from train_doctor.watchers.carried_states import CarriedStates
from train_doctor.watchers.choices import Choices
from train_doctor.watchers.clamped_labels import ClampedLabels
from train_doctor.watchers.class_axis import ClassAxis
from train_doctor.watchers.clip_values import ClipValues
from train_doctor.watchers.coarse_averages import CoarseAverages
from train_doctor.watchers.component_weights import ComponentWeights
from train_doctor.watchers.confidences import Confidences
from train_doctor.watchers.cosine_margins import CosineMargins
from train_doctor.watchers.cosines import Cosines
from train_doctor.watchers.critics import Critics
from train_doctor.watchers.crops import Crops
from train_doctor.watchers.crossed_maps import CrossedMaps
from train_doctor.watchers.crossed_rows import CrossedRows
from train_doctor.watchers.cut_adaptations import CutAdaptations
from train_doctor.watchers.cut_ids import CutIds
from train_doctor.watchers.cut_rollouts import CutRollouts
from train_doctor.watchers.cut_states import CutStates
from train_doctor.watchers.dead_terms import DeadTerms
from train_doctor.watchers.detached_terms import DetachedTerms
from train_doctor.watchers.divergences import Divergences
from train_doctor.watchers.dot_products import DotProducts
from train_doctor.watchers.drawn_anew import DrawnAnew
from train_doctor.watchers.dropout_at_end import DropoutAtEnd
from train_doctor.watchers.dropouts import Dropouts
from train_doctor.watchers.dropped import Dropped
from train_doctor.watchers.drowned_terms import DrownedTerms
from train_doctor.watchers.echoed_series import EchoedSeries
from train_doctor.watchers.edge_shares import EdgeShares
from train_doctor.watchers.empty_maps import EmptyMaps
from train_doctor.watchers.endings import Endings
from train_doctor.watchers.ends_hidden import EndsHidden
from train_doctor.watchers.ends_of_episodes import EndsOfEpisodes
from train_doctor.watchers.entropies import Entropies
from train_doctor.watchers.farthest import Farthest
from train_doctor.watchers.fields_apart import FieldsApart
from train_doctor.watchers.filled_labels import FilledLabels
from train_doctor.watchers.first_column import FirstColumn
from train_doctor.watchers.first_ends import FirstEnds
from train_doctor.watchers.first_graphs import FirstGraphs
from train_doctor.watchers.first_places import FirstPlaces
from train_doctor.watchers.first_states import FirstStates
from train_doctor.watchers.flags import Flags
from train_doctor.watchers.focused import Focused
from train_doctor.watchers.fractions_cut import FractionsCut
from train_doctor.watchers.free_weights import FreeWeights
from train_doctor.watchers.gaps import Gaps
from train_doctor.watchers.groups import Groups
from train_doctor.watchers.groups_of_others import GroupsOfOthers
from train_doctor.watchers.growing_averages import GrowingAverages
from train_doctor.watchers.ignored_labels import IgnoredLabels
from train_doctor.watchers.kept_halves import KeptHalves
from train_doctor.watchers.kept_noise import KeptNoise
from train_doctor.watchers.laid_across import LaidAcross
from train_doctor.watchers.late_masks import LateMasks
from train_doctor.watchers.lengths_of_embeddings import LengthsOfEmbeddings
from train_doctor.watchers.lengths_of_padding import LengthsOfPadding
from train_doctor.watchers.lent_gradients import LentGradients
from train_doctor.watchers.levels_across import LevelsAcross
from train_doctor.watchers.likelihoods import Likelihoods
from train_doctor.watchers.log_scales import LogScales
from train_doctor.watchers.logits_given import LogitsGiven
from train_doctor.watchers.lone_parameters import LoneParameters
from train_doctor.watchers.loss_graphs import LossGraphs
from train_doctor.watchers.loss_signs import LossSigns
from train_doctor.watchers.lost_states import LostStates
from train_doctor.watchers.made_anew import MadeAnew
from train_doctor.watchers.masked_least import MaskedLeast
from train_doctor.watchers.masked_means import MaskedMeans
from train_doctor.watchers.masked_pixels import MaskedPixels
from train_doctor.watchers.masked_targets import MaskedTargets
from train_doctor.watchers.masks import Masks
from train_doctor.watchers.members_alike import MembersAlike
from train_doctor.watchers.mined import Mined
from train_doctor.watchers.mirrored import Mirrored
from train_doctor.watchers.missing_codes import MissingCodes
from train_doctor.watchers.mix_shares import MixShares
from train_doctor.watchers.mixtures import Mixtures
from train_doctor.watchers.mixups import Mixups
from train_doctor.watchers.moved_rows import MovedRows
from train_doctor.watchers.negatives import Negatives
from train_doctor.watchers.never_left import NeverLeft
from train_doctor.watchers.noise import Noise
from train_doctor.watchers.noise_levels import NoiseLevels
from train_doctor.watchers.noise_times import NoiseTimes
from train_doctor.watchers.noisy_targets import NoisyTargets
from train_doctor.watchers.norm_of_few import NormOfFew
from train_doctor.watchers.not_put_back import NotPutBack
from train_doctor.watchers.null_classes import NullClasses
from train_doctor.watchers.one_direction import OneDirection
from train_doctor.watchers.one_place import OnePlace
from train_doctor.watchers.one_side import OneSide
from train_doctor.watchers.one_sided_judges import OneSidedJudges
from train_doctor.watchers.one_way_twice import OneWayTwice
from train_doctor.watchers.order_of_pieces import OrderOfPieces
from train_doctor.watchers.orders import Orders
from train_doctor.watchers.other_labels import OtherLabels
from train_doctor.watchers.other_places import OtherPlaces
from train_doctor.watchers.other_references import OtherReferences
from train_doctor.watchers.other_statistics import OtherStatistics
from train_doctor.watchers.outer_products import OuterProducts
from train_doctor.watchers.over_batch import OverBatch
from train_doctor.watchers.overlaps import Overlaps
from train_doctor.watchers.own_messages import OwnMessages
from train_doctor.watchers.own_samples import OwnSamples
from train_doctor.watchers.own_scale import OwnScale
from train_doctor.watchers.own_statistics import OwnStatistics
from train_doctor.watchers.own_targets import OwnTargets
from train_doctor.watchers.padded_divergences import PaddedDivergences
from train_doctor.watchers.pair_index import PairIndex
from train_doctor.watchers.pairs_apart import PairsApart
from train_doctor.watchers.past_rewards import PastRewards
from train_doctor.watchers.penalties import Penalties
from train_doctor.watchers.picked_across import PickedAcross
from train_doctor.watchers.pixel_scales import PixelScales
from train_doctor.watchers.places_in_front import PlacesInFront
from train_doctor.watchers.places_run_on import PlacesRunOn
from train_doctor.watchers.places_unseen import PlacesUnseen
from train_doctor.watchers.pooled import Pooled
from train_doctor.watchers.pooled_features import PooledFeatures
from train_doctor.watchers.pulls import Pulls
from train_doctor.watchers.pushed_labels import PushedLabels
from train_doctor.watchers.quantiles import Quantiles
from train_doctor.watchers.ranges import Ranges
from train_doctor.watchers.ratios import Ratios
from train_doctor.watchers.ratios_apart import RatiosApart
from train_doctor.watchers.redrawn import Redrawn
from train_doctor.watchers.relative_errors import RelativeErrors
from train_doctor.watchers.repeats import Repeats
from train_doctor.watchers.rescaled import Rescaled
from train_doctor.watchers.rises_alone import RisesAlone
from train_doctor.watchers.risk_matrices import RiskMatrices
from train_doctor.watchers.risk_sets import RiskSets
from train_doctor.watchers.rounded_weights import RoundedWeights
from train_doctor.watchers.row_slopes import RowSlopes
from train_doctor.watchers.rows_first import RowsFirst
from train_doctor.watchers.same_batches import SameBatches
from train_doctor.watchers.same_lists import SameLists
from train_doctor.watchers.same_margins import SameMargins
from train_doctor.watchers.same_masks import SameMasks
from train_doctor.watchers.same_scores import SameScores
from train_doctor.watchers.same_slopes import SameSlopes
from train_doctor.watchers.same_support import SameSupport
from train_doctor.watchers.sampled_actions import SampledActions
from train_doctor.watchers.sampling_grids import SamplingGrids
from train_doctor.watchers.scales import Scales
from train_doctor.watchers.scored import Scored
from train_doctor.watchers.shared_norms import SharedNorms
from train_doctor.watchers.shared_rows import SharedRows
from train_doctor.watchers.shifted_series import ShiftedSeries
from train_doctor.watchers.shown import Shown
from train_doctor.watchers.sides import Sides
from train_doctor.watchers.sines import Sines
from train_doctor.watchers.skipped_losses import SkippedLosses
from train_doctor.watchers.slices_written import SlicesWritten
from train_doctor.watchers.slips import Slips
from train_doctor.watchers.slopes import Slopes
from train_doctor.watchers.soft_targets import SoftTargets
from train_doctor.watchers.sorted_labels import SortedLabels
from train_doctor.watchers.spectral_powers import SpectralPowers
from train_doctor.watchers.spelt import Spelt
from train_doctor.watchers.spreads import Spreads
from train_doctor.watchers.squashed import Squashed
from train_doctor.watchers.squashed_twice import SquashedTwice
from train_doctor.watchers.still_states import StillStates
from train_doctor.watchers.stored import Stored
from train_doctor.watchers.straight import Straight
from train_doctor.watchers.strange_teachers import StrangeTeachers
from train_doctor.watchers.strangers import Strangers
from train_doctor.watchers.summed_rows import SummedRows
from train_doctor.watchers.surrogates import Surrogates
from train_doctor.watchers.swapped_average import SwappedAverage
from train_doctor.watchers.swapped_states import SwappedStates
from train_doctor.watchers.taken_gradients import TakenGradients
from train_doctor.watchers.taught_classes import TaughtClasses
from train_doctor.watchers.temperatures import Temperatures
from train_doctor.watchers.terms_without_slope import TermsWithoutSlope
from train_doctor.watchers.texts_apart import TextsApart
from train_doctor.watchers.thrown_away import ThrownAway
from train_doctor.watchers.tiled_labels import TiledLabels
from train_doctor.watchers.time_first import TimeFirst
from train_doctor.watchers.told_tokens import ToldTokens
from train_doctor.watchers.triplets import Triplets
from train_doctor.watchers.turned_gradients import TurnedGradients
from train_doctor.watchers.turned_heads import TurnedHeads
from train_doctor.watchers.turned_points import TurnedPoints
from train_doctor.watchers.turned_targets import TurnedTargets
from train_doctor.watchers.twins import Twins
from train_doctor.watchers.two_loaders import TwoLoaders
from train_doctor.watchers.unbounded_critics import UnboundedCritics
from train_doctor.watchers.undrawn import Undrawn
from train_doctor.watchers.uneven_times import UnevenTimes
from train_doctor.watchers.unfolded import Unfolded
from train_doctor.watchers.unlabelled_points import UnlabelledPoints
from train_doctor.watchers.unread_parts import UnreadParts
from train_doctor.watchers.unsorted import Unsorted
from train_doctor.watchers.views import Views
from train_doctor.watchers.weight_penalties import WeightPenalties
from train_doctor.watchers.weights_after_mean import WeightsAfterMean
from train_doctor.watchers.weights_as_numbers import WeightsAsNumbers
from train_doctor.watchers.who_chooses import WhoChooses
from train_doctor.watchers.wraps import Wraps
from train_doctor.watchers.zeros_added import ZerosAdded

ALL = (
    Dropped,
    Noise,
    Slopes,
    Spelt,
    Flags,
    Views,
    Scored,
    Orders,
    Axes,
    Repeats,
    Masks,
    Ratios,
    Blended,
    Cosines,
    CutStates,
    Choices,
    Bootstraps,
    Divergences,
    Averages,
    SamplingGrids,
    Scales,
    Spreads,
    Straight,
    Dropouts,
    AttentionDropouts,
    Endings,
    DropoutAtEnd,
    Attending,
    BareLayers,
    Overlaps,
    NormOfFew,
    CarriedStates,
    WeightsAfterMean,
    BothSides,
    OuterProducts,
    Sines,
    LossGraphs,
    MovedRows,
    Gaps,
    Background,
    SampledActions,
    EndsOfEpisodes,
    Wraps,
    ZerosAdded,
    CutRollouts,
    NoiseTimes,
    NotPutBack,
    OwnStatistics,
    PlacesUnseen,
    Strangers,
    WhoChooses,
    LengthsOfPadding,
    ClassAxis,
    EchoedSeries,
    PickedAcross,
    PixelScales,
    RisesAlone,
    RiskMatrices,
    SoftTargets,
    Confidences,
    OneWayTwice,
    RatiosApart,
    FieldsApart,
    UnboundedCritics,
    LengthsOfEmbeddings,
    DotProducts,
    Entropies,
    Stored,
    SlicesWritten,
    EndsHidden,
    Adversaries,
    Blanks,
    FractionsCut,
    MadeAnew,
    Mixtures,
    Mixups,
    MixShares,
    LentGradients,
    Likelihoods,
    Temperatures,
    TiledLabels,
    DeadTerms,
    Adapted,
    RiskSets,
    Triplets,
    Pulls,
    Mirrored,
    Mined,
    Aims,
    Surrogates,
    Squashed,
    Negatives,
    MaskedMeans,
    AtTheirEnds,
    Attacks,
    DrawnAnew,
    WeightsAsNumbers,
    OtherPlaces,
    OtherReferences,
    LossSigns,
    ClipValues,
    SameMasks,
    RoundedWeights,
    PaddedDivergences,
    CrossedMaps,
    CrossedRows,
    StrangeTeachers,
    NeverLeft,
    SquashedTwice,
    SkippedLosses,
    OneDirection,
    Penalties,
    Focused,
    OverBatch,
    OwnTargets,
    PairIndex,
    Twins,
    Redrawn,
    Shown,
    LogScales,
    LogitsGiven,
    SwappedAverage,
    CoarseAverages,
    FirstGraphs,
    KeptNoise,
    LaidAcross,
    TurnedTargets,
    OwnMessages,
    NoiseLevels,
    OnePlace,
    OneSide,
    Boxes,
    Quantiles,
    ThrownAway,
    Pooled,
    PooledFeatures,
    ComponentWeights,
    KeptHalves,
    StillStates,
    RowsFirst,
    SameSupport,
    PastRewards,
    OwnSamples,
    IgnoredLabels,
    Groups,
    GroupsOfOthers,
    PairsApart,
    ShiftedSeries,
    MaskedLeast,
    SortedLabels,
    TakenGradients,
    PushedLabels,
    Slips,
    MissingCodes,
    SharedRows,
    LostStates,
    Farthest,
    Angles,
    UnlabelledPoints,
    OtherStatistics,
    NullClasses,
    RowSlopes,
    FilledLabels,
    FirstColumn,
    FreeWeights,
    CosineMargins,
    WeightPenalties,
    RelativeErrors,
    Critics,
    TaughtClasses,
    OtherLabels,
    BestStates,
    TurnedGradients,
    SwappedStates,
    TermsWithoutSlope,
    TextsApart,
    Ranges,
    EdgeShares,
    MembersAlike,
    UnreadParts,
    OwnScale,
    OrderOfPieces,
    ClampedLabels,
    EmptyMaps,
    Sides,
    SpectralPowers,
    Unfolded,
    Crops,
    SameScores,
    SameLists,
    SameMargins,
    ToldTokens,
    SameSlopes,
    TurnedPoints,
    CutIds,
    DrownedTerms,
    SameBatches,
    Rescaled,
    Undrawn,
    NoisyTargets,
    MaskedPixels,
    FirstEnds,
    Unsorted,
    TurnedHeads,
    UnevenTimes,
    BoxCentres,
    FirstPlaces,
    LateMasks,
    PlacesInFront,
    CutAdaptations,
    GrowingAverages,
    SharedNorms,
    AnglesElsewhere,
    LevelsAcross,
    SummedRows,
    AskedTwice,
    DetachedTerms,
    FirstStates,
    LoneParameters,
    MaskedTargets,
    OneSidedJudges,
    TwoLoaders,
    TimeFirst,
    PlacesRunOn,
)
