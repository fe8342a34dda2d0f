"""4-bit weights: what one evaluation does to the gradients after it."""

from lessons.pitfalls import four_bit


def test_one_evaluation_spoils_4_bit_gradients_where_bitsandbytes_repacks_and_is_kept_from_it():
    as_it_comes, kept = four_bit.one_evaluation(keep=False), four_bit.one_evaluation(keep=True)
    assert kept["tensors with the right gradient"] == kept["of"]
    right = as_it_comes["tensors with the right gradient"] == as_it_comes["of"]
    assert right != as_it_comes["this machine repacks"], as_it_comes
