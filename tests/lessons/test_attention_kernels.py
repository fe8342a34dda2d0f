"""Attention kernels: those that run agree with the plain one and keep less than its table."""

from lessons import attention_kernels


def test_kernels_agree_and_the_fused_ones_keep_less():
    rows = {row["kernel"]: row for row in attention_kernels.compared(256)}
    assert len(rows) == len(attention_kernels.KERNELS) and rows["MATH"]["largest difference"] == 0
    fused = [row for name, row in rows.items() if name != "MATH" and row["runs here"]]
    assert fused
    for row in fused:
        assert row["largest difference"] < 1e-4 and row["kept KiB"] < rows["MATH"]["kept KiB"]


def test_a_kernel_that_is_missing_says_why():
    missing = [row for row in attention_kernels.compared(64) if not row["runs here"]]
    assert all(row["reason"] and "kept KiB" not in row for row in missing)


def test_what_the_plain_kernel_keeps_grows_with_the_square_of_the_length():
    short, long = (attention_kernels.compared(length)[0]["kept KiB"] for length in (128, 512))
    assert long > 6 * short
