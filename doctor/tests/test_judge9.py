"""Twenty-two more programs with bugs that people often make, by somebody who had not seen the checks: what is named.

The first sight of them, before any check was changed, is in judge9_first_sight.json: 14 of 22 named first, 3 true
warnings of the effect, and nothing said of a twin.
"""

from .step_programs import Blind, judged

BLIND = Blind("judge9")

NAMED = {
    "reinforce_sign": "F63",
    "gan_generator_labels": "F65",
    "audio_nll": "F3",
    "distill_kl": "F3",
    "vae_kl": "F44",
    "churn_one_logit": "F21",
    "simclr_temperature": "F37",
    "seg_loss_rewrapped": "F1",
    "diffusion_ema_rebind": "N28",
    "amp_scaler_bypassed": "N30",
    "rnn_clip_too_early": "N8",
    "multitask_loss_overwritten": "B1",
    "layers_in_python_list": "S19",
    "vqvae_no_straight_through": "F38",
    "dropout_always_on": "S24",
    "sorted_no_shuffle": "F20",
    "inplace_normalise": "D13",
    "gcn_unnormalised": "F4",
    "padding_mask_inverted": "F34",
    "rating_sigmoid": "F20",
}
UNSEEN = {
    "warmup_per_epoch": "a rate may stay low for as long as its author wants",
    "custom_swish_backward": "a backward of one's own is taken at its word",
}


def test_the_first_sight_is_on_record():
    record = BLIND.holds(NAMED, UNSEEN, harm=1.15)
    assert record["summary"]["named first"] == 14 and len(BLIND.faults) == 22
    assert not any(p["of the twin"] for p in record["programs"].values())


tests = judged(BLIND, NAMED, UNSEEN)
test_the_cause_is_named_first, test_what_is_not_seen_is_not_named_wrongly, test_nothing_is_said_of_a_twin = tests
