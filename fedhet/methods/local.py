"""Declaration of local training, the baseline without communication."""

from fedhet.methods.spec import MethodSpec, Protection, Sums

SPEC = MethodSpec(
    title="baseline: each client trains alone",
    paper="no paper",
    needs_task="loss",
    headline="common",
    paper_model="no paper; each client's model",
    late="averaged",
    any_model="loss",
    privacy=Protection("DP-SGD; clients send only scores on a shared test set"),
    sums=Sums(unsupported="clients send nothing"),
)
