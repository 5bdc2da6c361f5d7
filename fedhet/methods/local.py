"""The baseline in which each client trains alone: its declaration."""

from fedhet.methods.spec import MethodSpec, Protection

SPEC = MethodSpec(
    title="each client trains alone: the baseline",
    paper="no paper",
    headline="common",
    late="averaged",
    any_model=True,
    privacy=Protection("DP-SGD; only scores on a shared test set are sent"),
)
