"""A part of the tests on aarch64, which most Ascend hosts are: under qemu, in slices."""
