"""State of a client that persists across messages: models, received weights, and sent replies.

`ClientCodec` decodes instructions and encodes replies, which may depend on the state. Received
weights are stored on disk under their digest, next to the client's states, because a deployment
handles each message in a new process. If a client no longer has the weights, it reports this, and
the server sends them again.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
import torch
from flwr.client import Client, NumPyClient
from flwr.common import (
    Code,
    EvaluateIns,
    EvaluateRes,
    FitIns,
    FitRes,
    GetPropertiesIns,
    GetPropertiesRes,
    NDArrays,
    Parameters,
    Status,
    ndarrays_to_parameters,
)
from torch import Tensor, nn

from fedhet.base.arrays import Array, Arrays, group, grouped
from fedhet.base.disk import Folder, load_npz
from fedhet.base.errors import StateError
from fedhet.base.transfer import HOST, all_to_device
from fedhet.client_runtime.node import Node
from fedhet.config.resolve import Config
from fedhet.learning.devices import Compute, move
from fedhet.models import Refitted, to_host_arrays
from fedhet.runs.measures import EVALUATES_FIRST, EVALUATION
from fedhet.runs.storage import KEPT_STATES, ClientStore, Metadata, ModelStore, refuse_other
from fedhet.wire.contract import Sizes
from fedhet.wire.encodings import Coder
from fedhet.wire.identity import SERVER, is_name
from fedhet.wire.knowledge import (
    JOINED,
    Envelope,
    Knowledge,
    Packing,
    decode,
    digest_of,
    encode,
    expect,
    join,
    read_npy,
    separate,
)

METHOD_TENSORS = "kept"
"""Name of the group of the method's tensors in a saved state. No kind of model may have this
name."""
UNSENT = "unsent"
"""State group with the compression errors that error feedback adds to the next reply."""
UNSAVED = -1
_OK = Status(Code.OK, "Success")
LOG = logging.getLogger("fedhet")


class ClientState:
    """Private state of a client, kept in memory while the client is open, and saved in each round.

    The state in memory is reused only if it has the same version as the state on disk, because
    another process may have trained the client in the meantime. Versions count the saves of the
    client's state in a run, starting at 1.
    """

    def __init__(
        self,
        root: Path,
        client: str,
        identity: Mapping[str, str],
        compute: Compute,
        *,
        setup: Callable[[], dict[str, nn.Module]],
        training_set: Callable[[], tuple[Tensor, Tensor]],
    ) -> None:
        """Create an empty state; call `restore` before using it.

        A saved state must match `identity`. `setup` creates new models, and `training_set` returns
        the samples x and labels y on which a model without gradients was last fitted.
        """
        self.models: dict[str, nn.Module] = {}
        """The client's models by kind, on the device."""
        self.tensors: dict[str, Tensor] = {}
        """Other tensors that the method keeps, on the device."""
        self.metadata: dict[str, int | float | str] = {}
        """Numbers and strings that the method keeps."""
        self.round = 0
        """Round of the restored state, or 0 if the models are new."""
        self._root, self._client, self._identity = root, client, identity
        self._compute, self._setup, self._training_set = compute, setup, training_set
        self._store: ClientStore | None = None
        self._version = UNSAVED
        """Version of the state in memory: 0 for new models, UNSAVED for a modified state."""
        self._newest = 0
        """Newest version on disk at the time of `restore`, or 0 if no state existed."""

    @property
    def participations(self) -> int:
        """Number of rounds in which the client has trained."""
        return int(self.metadata.get("participations", 0))

    @property
    def folder(self) -> Path:
        """Directory for the client's private files in this run."""
        return self._opened.folder

    def held_tensors(self) -> Iterator[Tensor]:
        """Yield all tensors of the state."""
        for model in self.models.values():
            yield from model.state_dict().values()
        yield from self.tensors.values()

    def restore(self, run: str, before: int) -> None:
        """Restore the last state saved before round `before`, or create new models.

        States from later rounds are ignored, because a resumed server may repeat rounds. A state is
        skipped with a warning if it is damaged, contains NaN or infinity, or belongs to another
        run, client, method, model or task. Raises StateError if states exist but none is valid.
        """
        store = ClientStore(self._root, run, self._client)
        self._newest = _newest_version(store)
        past = [round for round in store.rounds() if round < before]
        version = _version_of(store, past[-1]) if past else 0
        is_readable = version > 0 or not past
        if is_readable and (store, version) == (self._store, self._version):
            if self._compute.device.type != "cpu":
                self._place()
            return
        self._store, self._version = store, UNSAVED
        errors: dict[int, StateError] = {}
        for round in reversed(past):
            self._reset(round)
            try:
                version = self._load(store, round)
            except StateError as error:
                errors[round] = error
                continue
            for skipped in errors.values():
                LOG.warning("%s: %s; using the state of round %d", self._client, skipped, round)
            break
        else:
            if errors:
                raise errors[past[-1]]
            version = 0
            self._reset(0)
        self._place()
        for model in self.models.values():
            if isinstance(model, Refitted) and self.participations:
                model.fit_later(self._training_set)
        self._version = version

    @contextlib.contextmanager
    def offloading(self) -> Iterator[None]:
        """Offload the state to the host after the block, to free GPU memory for other clients."""
        try:
            yield
        finally:
            if self._compute.device.type != "cpu":
                for model in self.models.values():
                    move(model, HOST)
                self.tensors = all_to_device(self.tensors, HOST)
            if self._compute.device.type == "cuda":
                torch.cuda.empty_cache()

    def _place(self) -> None:
        """Move the state to the device."""
        for model in self.models.values():
            self._compute.place(model)
        self.tensors = all_to_device(self.tensors, self._compute.device)

    def begin_round(self) -> None:
        """Mark the state in memory as modified, so that `restore` reads from disk until `save`."""
        self._version = UNSAVED

    def save(self, round: int, best_round: int = 0) -> None:
        """Save the state after `round`, and keep the saved state of `best_round`, if given.

        Raises StateError if another process has saved a newer state since `restore`.
        """
        store = self._opened
        if _newest_version(store) != self._newest:
            raise StateError(
                f"{store.folder}: another worker has saved a newer state; the state of round "
                f"{round} was discarded"
            )
        version = self._newest + 1
        metadata = {**self.metadata, **self._identity_in(store, round), "version": version}
        tensors: dict[str, Tensor] = {}
        for kind, model in self.models.items():
            tensors |= grouped(kind, model.state_dict())
        tensors |= grouped(METHOD_TENSORS, self.tensors)
        store.save(round, tensors, metadata, best_round)
        self._version = self._newest = version

    def write_confusion(self, counts: Array) -> None:
        """Write the confusion matrix of the last evaluation next to the saved states."""
        self._opened.write_confusion(counts)

    def _reset(self, round: int) -> None:
        self.models, self.tensors, self.metadata, self.round = self._setup(), {}, {}, round

    def _load(self, store: ClientStore, round: int) -> int:
        tensors, metadata = store.load(round)
        path, identity = store.path(round), self._identity_in(store, round)
        refuse_other(path, metadata, identity, "this client's")
        for kind, model in self.models.items():
            weights = group(tensors, kind)
            for name, value in model.state_dict().items():  # PyTorch would cast silently.
                if name in weights and (dtype := weights[name].dtype) != value.dtype:
                    fault = f"tensor {name}: expected {value.dtype}, got {dtype}"
                    raise StateError(f"{path}: model {kind}: {fault}")
            try:
                model.load_state_dict(weights)
            except RuntimeError as error:
                raise StateError(f"{path} does not fit the model {kind}: {error}") from None
            if not all(bool(value.isfinite().all()) for value in weights.values()):
                raise StateError(f"{path}: model {kind} contains NaN or infinity")
        self.tensors = group(tensors, METHOD_TENSORS)
        self.metadata = {k: v for k, v in metadata.items() if k not in {*identity, "version"}}
        version = _version_in(metadata)
        if not version or not isinstance(metadata.get("participations", 0), int):
            raise StateError(f"{path}: 'version' and 'participations' must be integers")
        return version

    def _identity_in(self, store: ClientStore, round: int) -> dict[str, str | int]:
        """Return the metadata that identifies the client, run and round of a saved state."""
        return {**self._identity, "run": store.run, "client": store.client, "round": round}

    @property
    def _opened(self) -> ClientStore:
        assert self._store is not None, "call restore first"
        return self._store


class ClientCodec:
    """Codec for instructions and replies, with the encoding set by `wire.encoding`."""

    def __init__(self, config: Config, node: Node, state: ClientState) -> None:
        run, self._method = config.run, config.method
        self._node, self._state = node, state
        self._instructions, self._replies = (
            Coder.for_contract(run.wire, contract, run.seed)
            for contract in (self._method.spec.instructions, self._method.spec.replies)
        )
        if run.privacy.secure_aggregation:  # Masked vectors cannot be compressed.
            self._replies = None

    def decode_instruction(
        self, arrays: NDArrays, sizes: Callable[[], Sizes], *, may_be_empty: bool = False
    ) -> tuple[Envelope, Knowledge]:
        """Decode the server's message, validate it, and store its weights.

        With `may_be_empty`, accepts a message without content, for evaluation. Raises
        KnowledgeError if the message violates the contract, and MissingBaseError if the client does
        not have the base weights of the message.
        """
        envelope, knowledge = decode(arrays, SERVER, self._weights, self._node.max_model_bytes)
        expect(envelope, run=None, method=self._method.name, round=None, sender=SERVER)
        if knowledge.tensors or knowledge.scalars or not may_be_empty:
            contract = self._method.spec.instructions
            contract.check(SERVER, knowledge.tensors, knowledge.scalars, sizes())
        knowledge = knowledge.declaring(self._method.spec.instructions)
        if self._instructions and (weights := self._instructions.weights_of(knowledge.tensors)):
            # Keep the weights from the last few rounds. Delete weights from later rounds, which
            # were sent before the server resumed from an earlier round.
            store, digest = self._store(envelope.run), digest_of(weights)
            is_stored = any(key[1] == digest for key in store.contents())
            if not is_stored or self._weights(envelope, digest) is None:
                store.put((envelope.round, digest), weights)
                past = [key for key in store.contents() if key[0] <= envelope.round]
                store.keep(past[-KEPT_STATES:])
        return envelope, knowledge

    def encode_reply(
        self, envelope: Envelope, instruction: Knowledge, reply: Knowledge
    ) -> NDArrays:
        """Encode the reply to an instruction, and save the compression errors in the state."""
        reply_envelope = replace(envelope, sender=self._node.name)
        if self._replies is None or self._instructions is None:
            return encode(reply_envelope, reply)
        base = self._instructions.weights_of(instruction.tensors)
        key = (self._node.name, envelope.round)
        unsent = to_host_arrays(group(self._state.tensors, UNSENT))
        encoded, unsent = self._replies.reply(key, reply.tensors, base, unsent)
        tensors = {n: t for n, t in self._state.tensors.items() if not n.startswith(f"{UNSENT}/")}
        errors = {name: torch.from_numpy(value) for name, value in unsent.items()}
        self._state.tensors = tensors | grouped(UNSENT, errors)
        needs_base = any(each.difference for each in encoded.values())
        packing = Packing(encoded, digest_of(base) if needs_base else 0)
        return encode(reply_envelope, reply, packing)

    def _weights(self, envelope: Envelope, digest: int) -> Arrays | None:
        """Return the stored weights with a digest, or None if they are missing or damaged."""
        store = self._store(envelope.run) if is_name(envelope.run) else None
        key = next((k for k in store.contents() if k[1] == digest), None) if store else None
        if store is None or key is None:
            return None
        try:
            weights = store.get(key)
        except StateError as error:
            LOG.warning("%s: %s", self._node.name, error)
            return None
        return weights if digest_of(weights) == digest else None

    def _store(self, run: str) -> ModelStore:
        folder = ClientStore(self._node.state_dir, run, self._node.name).folder
        return ModelStore(folder / "received", self._node.state_dir)


class MessageClient(Client):
    """Flower's interface of a client.

    Flower's own wrapper of a `NumPyClient` parses messages with `ast`. In some versions of Python,
    `ast` fails if several threads use it at the same time (see `fedhet.base.arrays.read_header`).
    """

    def __init__(self, client: NumPyClient) -> None:
        self.numpy_client = client

    def get_properties(self, ins: GetPropertiesIns) -> GetPropertiesRes:
        """Return the client's properties."""
        return GetPropertiesRes(_OK, self.numpy_client.get_properties(ins.config))

    def fit(self, ins: FitIns) -> FitRes:
        """Train on an instruction, and return the reply.

        If the message starts with the arrays of an evaluation's instruction, evaluates first. The
        arrays of the reply are joined if those of the instruction are.
        """
        received, config, evaluated = _arrays_of(ins.parameters), dict(ins.config), {}
        if count := int(config.pop(EVALUATES_FIRST, 0)):
            evaluated = self.numpy_client.evaluate(received[:count], {})[2]
            received = received[count:]
        arrays, samples, metrics = self.numpy_client.fit(received, config)
        metrics |= {f"{EVALUATION}{name}": value for name, value in evaluated.items()}
        parameters = ndarrays_to_parameters(arrays)
        if ins.parameters.tensor_type == JOINED:
            parameters = join(parameters)
        return FitRes(_OK, parameters, samples, metrics)

    def evaluate(self, ins: EvaluateIns) -> EvaluateRes:
        """Evaluate the client's models."""
        loss, samples, metrics = self.numpy_client.evaluate(_arrays_of(ins.parameters), ins.config)
        return EvaluateRes(_OK, loss, samples, metrics)


def _arrays_of(parameters: Parameters) -> NDArrays:
    """Read the arrays of a message. They are copies, so that the client may change them."""
    tensors = enumerate(separate(parameters, SERVER))
    return [read_npy(data, SERVER, f"array {position}").copy("K") for position, data in tensors]


class ReplyStore:
    """On-disk store of a client's recent replies, which are sent again if a request is repeated."""

    def __init__(self, root: Path, run: str, client: str, kind: str) -> None:
        self._folder, self._kind = Folder(root / run / client, root, private=True), kind

    def get(self, round: int) -> NDArrays | None:
        """Return the stored reply of a round, or None if no reply is stored.

        Raises StateError if the file cannot be read.
        """
        path = self._folder.path / self._name(round)
        if not path.is_file():
            return None
        try:
            return list(load_npz(path).values())
        except (OSError, ValueError, EOFError, BadZipFile) as error:
            raise StateError(f"{path}: damaged ({error})") from None

    def put(self, round: int, arrays: NDArrays) -> None:
        """Store the reply of a round, and keep the replies of the last few rounds.

        Replies of later rounds are deleted, because the server has resumed from an earlier round.
        """
        name = self._name(round)
        with self._folder.replacing(name, private=True) as path, path.open("wb") as file:
            np.savez(file, *arrays)
        stored = sorted(path.name for path in self._folder.path.glob(f"{self._kind}-*.npz"))
        kept = [each for each in stored if each <= name][-KEPT_STATES:]
        self._folder.remove([each for each in stored if each not in kept])

    def newest(self) -> int:
        """Return the last round with a stored reply, or 0 if no reply is stored."""
        stored = self._folder.path.glob(f"{self._kind}-*.npz")
        return max((int(path.stem.rpartition("-")[2]) for path in stored), default=0)

    def _name(self, round: int) -> str:
        return f"{self._kind}-{round:06d}.npz"


def _newest_version(store: ClientStore) -> int:
    """Return the version of the newest readable state, or 0 if no state is readable."""
    return next((v for round in reversed(store.rounds()) if (v := _version_of(store, round))), 0)


def _version_of(store: ClientStore, round: int) -> int:
    """Return the version of a saved state, or 0 if it cannot be read."""
    try:
        return _version_in(store.metadata(round))
    except StateError:
        return 0


def _version_in(metadata: Metadata) -> int:
    version = metadata.get("version")
    return version if isinstance(version, int) and version > 0 else 0
