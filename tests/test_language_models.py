"""Causal language models: texts, instructions, losses, and rounds compared with transformers."""

import copy
import html
import json

import numpy as np
import pytest
import torch
from bases import make_gpt2, make_language_model
from federation import Server, records, run, small
from rounds import clients
from typer.testing import CliRunner

import fedhet
from fedhet import models
from fedhet.base.errors import DataError, ModelError, SettingsError
from fedhet.base.metrics import METRICS
from fedhet.base.seeding import torch_generator
from fedhet.cli import app
from fedhet.cli.results import printable_lines
from fedhet.config.resolve import resolve
from fedhet.data.dataset import Split
from fedhet.data.sources import read_source
from fedhet.data.spec import DataSpec
from fedhet.data.store import RunData
from fedhet.data.texts import VARIABLE
from fedhet.learning.devices import CPU
from fedhet.learning.training import batches, optimization_for
from fedhet.methods.registry import all_methods
from fedhet.models.adapted import describe_adapted, merged_base, prepare_base
from fedhet.privacy import sgd
from fedhet.runs.units import printable
from fedhet.settings.engine import ComputeSettings
from fedhet.settings.run import TrainingSettings
from fedhet.tasks import NOT_PREDICTED, CausalLanguageModeling

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
END, SHAPE = 0, (0, 24, 258)
"""Id of the end-of-text token, and shape of samples: 257 token ids, and PADDING."""
TEXTS = ["the cat sat on the mat", "a dog ran to the lake", "we count 1 2 3 4", "it rains"]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    root = tmp_path_factory.mktemp("bases")
    make_language_model(root / "tiny")
    make_language_model(root / "tied", tied=True, max_shard_size="8KB")
    make_gpt2(root / "gpt2")
    return root


@pytest.fixture(autouse=True)
def _variable(home, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(home))


def tokens_of(home, text):
    tokenizer = transformers.AutoTokenizer.from_pretrained(home / "tiny")
    return tokenizer(text).input_ids


def read(place, **settings):
    settings = {"tokenizer": "tiny", "max_tokens": 24, "task": "causal-lm", **settings}
    return read_source(DataSpec(dataset=place, clients=2, **settings))


def rows_of(split):
    """Return the ids and the targets of each sample, without padding."""
    ids = [[0 if t == 257 else t for t in row if t] for row in split.x.tolist()]
    targets = [row[: len(own)] for row, own in zip(split.y.tolist(), ids, strict=True)]
    return ids, targets


def padded(rows):
    x = torch.zeros(len(rows), SHAPE[1], dtype=torch.int64)
    y = torch.full_like(x, NOT_PREDICTED)
    for place, row in enumerate(rows):
        x[place, : len(row)] = torch.tensor([t or 257 for t in row])
        y[place, : len(row) - 1] = torch.tensor(row[1:])
    return x, y


def trained(model):
    """Fill the factors B, which start at zero, so that the adapters have an effect."""
    draws = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, each in model.named_parameters():
            if "lora_B" in name:
                each.normal_(generator=draws)
    return model


# Data


def test_texts_of_each_owner_are_packed_into_windows(home, tmp_path):
    lines = ["who,text", "b,xyz", "a,abcdefgh", "b,uvw"]
    (tmp_path / "train.csv").write_text("\n".join(lines))
    dataset = read(f"text:{tmp_path}", by="who", max_tokens=6)
    ids, targets = rows_of(dataset.train)
    first = [*tokens_of(home, "xyz"), END, *tokens_of(home, "uvw"), END]
    second = [*tokens_of(home, "abcdefgh"), END]
    assert ids == [first[:6], first[6:], second[:6], second[6:]]
    assert targets == [[*row[1:], NOT_PREDICTED] for row in ids]
    assert dataset.groups.tolist() == [1, 1, 0, 0]
    assert dataset.group_names == ("a", "b")
    assert dataset.format.task == CausalLanguageModeling()
    assert dataset.format.outputs == 1


@pytest.mark.parametrize("layout", ["file", "parts", "directory"])
def test_layouts_of_text_files(home, tmp_path, layout):
    place = tmp_path
    if layout == "file":
        place = tmp_path / "all.txt"
        place.write_text("abc")
    elif layout == "parts":
        (tmp_path / "train.txt").write_text("abc")
        (tmp_path / "test.txt").write_text("de")
    else:
        (tmp_path / "sub").mkdir()
        (tmp_path / "sub" / "one.txt").write_text("abc")
    dataset = read(f"text:{place}")
    assert rows_of(dataset.train)[0] == [[*tokens_of(home, "abc"), END]]
    assert (dataset.test is not None) == (layout == "parts")


def jsonl(path, *examples):
    path.write_text("\n".join(map(json.dumps, examples)))
    return f"instructions:{path}"


def test_only_completions_are_predicted(home, tmp_path):
    place = jsonl(
        tmp_path / "train.jsonl",
        {"prompt": "ab", "completion": " cd"},
        {"instruction": "say", "input": "x", "output": "ok"},
        {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "r"}]},
    )
    ids, targets = rows_of(read(place, max_tokens=60).train)
    prompts = ["ab", "### Instruction:\nsay\n\n### Input:\nx\n\n### Response:\n"]
    prompts += ["### User:\nq\n\n### Assistant:\n"]
    for row, target, prompt, end in zip(ids, targets, prompts, (" cd", "ok", "r\n\n"), strict=True):
        before, after = tokens_of(home, prompt), [*tokens_of(home, end), END]
        assert row == before + after
        assert target == [NOT_PREDICTED] * (len(before) - 1) + after + [NOT_PREDICTED]


def test_chat_template_separates_completions(home, tmp_path, monkeypatch):
    folder = make_language_model(tmp_path / "bases" / "chat")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}<end>{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    monkeypatch.setenv(VARIABLE, str(folder.parent))
    talk = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
    messages = [{"role": role, "content": text} for role, text in talk]
    place = jsonl(tmp_path / "train.jsonl", {"messages": messages})
    ids, targets = rows_of(read(place, tokenizer="chat", max_tokens=60).train)
    parts = [("[user]a<end>[assistant]", 0), ("b<end>", 1), ("[user]c<end>[assistant]", 0)]
    parts += [("d<end>", 1)]
    expected = [(t, keep) for text, keep in parts for t in tokens_of(home, text)]
    assert ids == [[token for token, _ in expected]]
    after = [token if keep else NOT_PREDICTED for token, keep in expected[1:]]
    assert targets == [[*after, NOT_PREDICTED]]


def test_truncation_is_counted_in_one_warning(home, tmp_path, caplog):
    place = jsonl(
        tmp_path / "train.jsonl",
        {"prompt": "a", "completion": "b"},
        {"prompt": "a", "completion": "b" * 30},
        {"prompt": "a" * 30, "completion": "b"},
    )
    assert len(read(place).train) == 2
    (warning,) = [each.getMessage() for each in caplog.records]
    assert "2 of 3 examples are longer than data.max-tokens = 24" in warning
    assert "1 without any token of a completion were left out" in warning


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("[1]", "line 1: not a readable JSON object"),
        ("{", "line 1: not a readable JSON object"),
        ('{"text": "a"}', "expected the keys 'messages'; 'prompt' and 'completion'"),
        ('{"prompt": "a"}', "completion: expected a text, got None"),
        ('{"prompt": "a", "completion": 3}', "completion: expected a text, got 3"),
        ('{"messages": [{"role": "user", "content": "a"}]}', "a message of the assistant"),
        ('{"messages": [{"role": "bot", "content": "a"}]}', "message 1: expected 'content'"),
        ("", "expected examples with a completion"),
    ],
)
def test_invalid_instructions_name_the_line(tmp_path, line, fault):
    (tmp_path / "train.jsonl").write_text(line)
    with pytest.raises(DataError) as error:
        read(f"instructions:{tmp_path}")
    assert str(tmp_path / "train.jsonl") in str(error.value)
    assert fault in str(error.value)


def test_token_hashes_cannot_be_predicted(tmp_path):
    (tmp_path / "train.txt").write_text("abc")
    with pytest.raises(SettingsError, match=r"data\.tokenizer.*expected the name of the base"):
        read(f"text:{tmp_path}", tokenizer="words")


# Models and losses, compared with transformers


@pytest.mark.parametrize("base", ["tiny", "tied", "gpt2"])
def test_outputs_and_loss_are_those_of_transformers(home, base):
    rows = [[5, 6, 0, 7, 8], [9, 10, 11], [12, 13, 14, 15]]
    x, y = padded(rows)
    y[2, 0] = NOT_PREDICTED
    reference = transformers.AutoModelForCausalLM.from_pretrained(home / base).eval()
    ids, mask = torch.zeros(3, 5, dtype=torch.int64), torch.zeros(3, 5, dtype=torch.int64)
    labels = torch.full((3, 5), -100)
    for place, row in enumerate(rows):
        ids[place, : len(row)], mask[place, : len(row)] = torch.tensor(row), 1
        labels[place, : len(row)] = torch.tensor(row)
    labels[2, 1] = -100
    expected = reference(input_ids=ids, attention_mask=mask, labels=labels)
    model = models.build(f"causal-lora4:{base}", SHAPE, 1, seed=0)
    outputs = model(x)
    torch.testing.assert_close(outputs[mask.bool()], expected.logits[mask.bool()])
    loss = CausalLanguageModeling().loss()(outputs, y)
    torch.testing.assert_close(loss, expected.loss)
    by_text = CausalLanguageModeling().for_sample_gradients().loss()(outputs, y)
    likely = outputs.log_softmax(2)
    means = [
        -torch.stack([likely[n, t, y[n, t]] for t in range(5) if y[n, t] >= 0]).mean()
        for n in range(3)
    ]
    torch.testing.assert_close(by_text, torch.stack(means).mean())
    by_sample = CausalLanguageModeling().loss("none")(outputs, y)
    torch.testing.assert_close(by_sample, torch.stack(means))


def test_padding_side_does_not_matter(home):
    reference = transformers.AutoModelForCausalLM.from_pretrained(home / "tiny").eval()
    x, _ = padded([[5, 6, 7], [8, 9, 10, 11, 12]])
    left = torch.tensor([[0, 0, 5, 6, 7], [8, 9, 10, 11, 12]])
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    expected = reference(input_ids=left, attention_mask=mask).logits[0, 2:]
    outputs = models.build("causal-lora4:tiny", SHAPE, 1, seed=0)(x)[0, :3]
    torch.testing.assert_close(outputs, expected, rtol=1e-4, atol=1e-5)


def test_perplexity_and_accuracy_of_tokens():
    truth, logits = torch.tensor([[2, 0, -100], [1, -100, -100]]), torch.zeros(2, 3, 4)
    logits[0, 0, 2], logits[0, 1, 3], logits[1, 0, 1] = 2.0, 1.0, -1.0

    class Fixed(torch.nn.Module):
        def forward(self, x):
            return logits[x[:, 0]]

    task = CausalLanguageModeling()
    split = Split(torch.tensor([[0, 1, 1], [1, 1, 1]]), truth)
    score = task.evaluate(Fixed(), split, CPU, task.metrics)
    e = np.exp
    nll = -np.log([e(2) / (e(2) + 3), 1 / (e(1) + 3), e(-1) / (e(-1) + 3)])
    assert score.metrics["perplexity"] == pytest.approx(e(nll.mean()), rel=1e-6)
    assert score.metrics["token-accuracy"] == pytest.approx(1 / 3)
    assert score.loss == pytest.approx(nll.mean(), rel=1e-6)
    assert score.majority == pytest.approx(3.0)  # Three different tokens, each once.
    assert METRICS["perplexity"].lower_is_better


def test_checkpointing_has_the_same_gradients():
    x, y = padded([[5, 6, 7, 8], [9, 10, 11]])
    gradients = []
    for recomputes in (False, True):
        model = trained(models.build("causal-lora4:tiny", SHAPE, 1, seed=0)).train()
        if recomputes:
            prepare_base(model, ComputeSettings(gradient_checkpointing=True))
            model = copy.deepcopy(model)
        CausalLanguageModeling().loss()(model(x), y).backward()
        gradients.append([each.grad for each in model.parameters()])
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("method", ["fedlora", "local"])
def test_setting_computes_layers_again_in_the_backward_pass(tmp_path, method):
    """Each layer runs twice per training step, and once without the setting."""
    x, y = padded([[5, 6, 7, 8], [9, 10, 11]])
    for is_on in (False, True):
        config = federation(tmp_path, method, gradient_checkpointing=is_on)
        client = next(iter(clients(Server(config, tmp_path / str(is_on))).values()))
        client.state.restore("run", 1)
        network, calls = client.network.train(), []
        layer = network.extractor._hidden[0].model.layers[1].mlp
        hook = layer.register_forward_pre_hook(lambda *call, calls=calls: calls.append(1))
        client.task.loss()(network(x), y).backward()
        hook.remove()
        assert len(calls) == 1 + is_on


def test_clients_share_one_base():
    first, second = (
        models.build(f"causal-lora{r}:tiny", SHAPE, 1, seed=0).extractor for r in (2, 8)
    )
    networks = [each.network(CPU.device, torch.float32) for each in (first, second)]
    weights = [dict(n.named_parameters())["lm_head.weight"].data_ptr() for n in networks]
    assert weights[0] == weights[1]


def test_gradient_of_a_text_does_not_depend_on_the_others():
    x, y = padded([[5, 6, 7, 8, 9, 10], [9, 10, 11], [3, 4]])
    task = CausalLanguageModeling().for_sample_gradients()
    model = trained(models.build("causal-lora2:tiny", SHAPE, 1, seed=0)).train()
    parameters = list(model.parameters())
    plain = TrainingSettings(optimizer="sgd", lr=0.1)
    optimizer = optimization_for(parameters, plain, CPU)
    with sgd.dp_sgd(optimizer, [model], 0.0, 1.0, 3, "text", SHAPE):
        task.loss()(model(x), y).backward()
        together = [each.grad_sample.clone() for each in parameters]
    for row in range(3):
        part = slice(row, row + 1)
        alone = torch.autograd.grad(task.loss()(model(x[part]), y[part]), parameters)
        for several, single in zip(together, alone, strict=True):
            torch.testing.assert_close(several[row], single, rtol=1e-4, atol=1e-6)


def test_a_base_model_is_described_before_a_run():
    count, frozen, layers = describe_adapted("causal-lora4:gpt2")
    assert [row[0] for row in layers] == [f"transformer.h.{n}.attn.c_attn" for n in (0, 1)]
    assert count == 2 * 4 * (16 + 48)
    assert frozen > 257 * 16


# Rounds


def corpus(root):
    lines = ["who,text", *(f"{'abc'[k % 3]},{TEXTS[k % 4]} {k}" for k in range(60))]
    (root / "train.csv").write_text("\n".join(lines))
    lines = ["who,text", *(f"{'abc'[k % 3]},{TEXTS[k % 4]} {99 - k}" for k in range(9))]
    (root / "test.csv").write_text("\n".join(lines))
    return f"text:{root}"


def federation(root, method="fedlora", **changes):
    few = {
        "dataset": corpus(root), "task": "causal-lm", "tokenizer": "tiny", "max_tokens": 24,
        "clients": 2, "models": ["causal-lora4:tiny"], "batch_size": 4, "local_epochs": 2,
        "max_samples": 0, "min_samples": 4, "partition": "iid", "rounds": 2,
    }  # fmt: skip
    return small(method, **{**few, **changes})


def test_a_round_equals_peft_on_the_same_batches(home, tmp_path):
    config = federation(tmp_path, "fedavg", clients=1, rounds=1, optimizer="adam", lr=0.01)
    run(config, tmp_path / "out")
    initial = models.build("causal-lora4:tiny", SHAPE, 1, seed=config.run.seed)
    data = RunData.for_run(config.run).client(0).train
    base = transformers.AutoModelForCausalLM.from_pretrained(home / "tiny")
    targets = ["q_proj", "v_proj"]
    lora = peft.LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0, target_modules=targets)
    reference = peft.get_peft_model(base, lora)
    ours = {f"base_model.model.{n}": v for n, v in initial.extractor.state_dict().items()}
    peft.set_peft_model_state_dict(reference, ours)
    optimizer = torch.optim.Adam([p for p in reference.parameters() if p.requires_grad], 0.01)
    order = torch_generator(config.run.seed, "client-0", 1, "batches")
    reference.train()
    for _ in range(2):
        total = 0.0
        for rows in batches(len(data), 4, order):
            ids, mask = data.x[rows].where(data.x[rows] != 257, 0), data.x[rows] != 0
            labels = ids.where(mask, -100)
            loss = reference(input_ids=ids, attention_mask=mask.long(), labels=labels).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * len(rows)
    expected = peft.get_peft_model_state_dict(reference)
    (record,) = records(tmp_path / "out")
    assert record["loss"]["mean"] == pytest.approx(total / len(data), rel=1e-5)
    extractor = fedhet.load(tmp_path / "out").model("client-0", "private").extractor
    for name, value in extractor.state_dict().items():
        torch.testing.assert_close(value, expected[f"base_model.model.{name}"], rtol=0, atol=1e-5)


@pytest.fixture(scope="module")
def finished(home, tmp_path_factory):
    root = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, str(home))
        config = federation(
            root, by="who", clients=3, models=[f"causal-lora{r}:tiny" for r in (2, 4, 8)], lr=0.02
        )
        run(config, root / "out")
        yield fedhet.load(root / "out")


def test_perplexity_falls(finished, home):
    first, last = (
        each["metrics"]["perplexity"]["common"]["global"]["mean"]
        for each in records(finished.directory)
    )
    assert last < first


def test_generated_text_is_that_of_transformers(home, finished, tmp_path):
    text = finished.generate("client-1", "the cat", kind="private", max_tokens=8)
    finished.export("client-1", tmp_path / "adapter", form="peft", kind="private")
    base = transformers.AutoModelForCausalLM.from_pretrained(home / "tiny")
    network = peft.PeftModel.from_pretrained(base, str(tmp_path / "adapter")).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(home / "tiny")
    prompt = tokenizer("the cat", return_tensors="pt")
    tokens = network.generate(
        input_ids=prompt["input_ids"], attention_mask=prompt["attention_mask"], max_new_tokens=8,
        do_sample=False, pad_token_id=0,
    )  # fmt: skip
    added = tokens[0, prompt["input_ids"].shape[1] :]
    assert text == tokenizer.decode(added, skip_special_tokens=True)
    sampled = [
        finished.generate("client-1", "the cat", temperature=2.0, seed=seed) for seed in (1, 1, 2)
    ]
    assert sampled[0] == sampled[1] != sampled[2]
    with pytest.raises(ModelError, match=r"prompt: expected 1 to 63 tokens, got 70"):
        finished.generate("client-1", "x" * 70)


def test_merged_export_is_a_causal_language_model(finished, tmp_path):
    finished.export("client-2", tmp_path / "merged", form="merged", kind="private")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    model = finished.model("client-2", "private")
    x, _ = padded([[5, 6, 7, 8]])
    with torch.no_grad():
        expected, outputs = model(x)[0], loaded(input_ids=x[:, :4]).logits[0]
    torch.testing.assert_close(outputs, expected, rtol=1e-4, atol=1e-5)


def test_language_models_predict_no_classes(finished):
    with pytest.raises(ModelError, match="Use `fedhet generate`"):
        finished.predict("client-0", ["text"])


def test_methods_and_models_that_do_not_fit_are_refused(tmp_path):
    able = {n for n, m in all_methods()[0].items() if "causal-lm" in m.spec.tasks}
    assert able == {
        "central", "ditto", "fedavg", "fedbn", "fedlora", "fedprox", "fedsa", "local", "pfedme",
        "scaffold",
    }  # fmt: skip
    values = {"data.dataset": corpus(tmp_path), "data.task": "causal-lm", "data.tokenizer": "tiny"}
    with pytest.raises(SettingsError, match=r"data\.task.*one vector of outputs for each public"):
        resolve({**values, "method": "fedmd"})
    with pytest.raises(SettingsError, match=r"text-cnn.*causal-lm: expected causal-lora8:NAME"):
        resolve({**values, "method": "local", "models.pool": "text-cnn"})
    with pytest.raises(SettingsError, match=r"causal-lora8:tiny.*classification: expected another"):
        resolve({"method": "local", "models.pool": "causal-lora8:tiny"})
    assert resolve({**values, "method": "local"}).run.models.pool == ("causal-lora8:tiny",)


def test_bidirectional_base_models_are_refused(tmp_path, monkeypatch):
    config = transformers.BertConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        vocab_size=257, is_decoder=False,
    )  # fmt: skip
    transformers.BertForMaskedLM(config).save_pretrained(tmp_path / "bert")
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    with pytest.raises(ModelError, match="expected a causal language model, got bert"):
        models.build("causal-lora4:bert", SHAPE, 1, seed=0)


def test_target_layers_are_those_of_peft():
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as TARGETS

    from fedhet.models.adapted import FUSED_TARGETS
    from fedhet.models.adapted import TARGETS as SEPARATE

    for name in (
        "llama",
        "mistral",
        "qwen2",
        "qwen3",
        "gemma",
        "gemma2",
        "opt",
        "stablelm",
        "gptj",
    ):
        assert set(TARGETS[name]) == {"q_proj", "v_proj"} <= SEPARATE, name
    fused = {"gpt2", "gpt_bigcode", "gpt_neox", "bloom", "falcon", "codegen", "mpt"}
    assert {target for name in fused for target in TARGETS[name]} == FUSED_TARGETS


@pytest.mark.parametrize("rule", ["flora", "fedex"])
@pytest.mark.parametrize("base", ["tiny", "gpt2"])
def test_merging_rules_change_the_base_of_language_models(home, tmp_path, rule, base):
    """After two rounds, the outputs equal those of the base with the literal sum of products."""
    changes = {"models": [f"causal-lora{r}:{base}" for r in (2, 4)], "aggregation": rule}
    config = federation(tmp_path, lr=0.02, **changes)
    run(config, tmp_path / "out")
    model = fedhet.load(tmp_path / "out").model("client-1", "global")
    state = model.extractor.state_dict()
    reference = transformers.AutoModelForCausalLM.from_pretrained(home / base).eval()
    paths = sorted({name.rpartition(".merged_")[0] for name in state if ".merged_" in name})
    assert paths
    with torch.no_grad():
        for path in paths:
            layer = reference.get_submodule(path)
            names = [f"{path}.{kind}" for kind in ("merged_{}", "lora_{}.weight")]
            factors = [[state[name.format(f)].double() for f in "BA"] for name in names]
            change = sum(2 * b @ a for b, a in factors).float()
            layer.weight += change.T if base == "gpt2" else change
        x, _ = padded([[5, 6, 7, 8], [9, 10, 11, 12]])
        expected = reference(input_ids=x[:, :4]).logits
        torch.testing.assert_close(model(x), expected, rtol=1e-3, atol=1e-4)
        merged = merged_base(model.extractor)(input_ids=x[:, :4]).logits
        torch.testing.assert_close(merged, expected, rtol=1e-3, atol=1e-4)


ARCHITECTURES = {
    "bloom": {"hidden_size": 16, "n_layer": 2, "n_head": 2},
    "falcon": {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2},
    "gemma3_text": {"head_dim": 8, "pad_token_id": 1},
    "gpt_neox": {},
    "gptj": {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64, "rotary_dim": 4},
    "mistral": {},
    "mpt": {"d_model": 16, "n_heads": 2, "n_layers": 2, "max_seq_len": 64},
    "opt": {"ffn_dim": 16, "word_embed_proj_dim": 16, "pad_token_id": 1},
    "phi3": {"pad_token_id": 1},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architectures_have_the_outputs_of_transformers(tmp_path, monkeypatch, name):
    """All adapters are trained, and padding does not affect other tokens."""
    common = {
        "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "intermediate_size": 16, "max_position_embeddings": 64,
    }  # fmt: skip
    own = {"vocab_size": 257, "bos_token_id": None, "eos_token_id": 0, **ARCHITECTURES[name]}
    if not own.keys() & {"n_embd", "n_layer", "n_layers"}:
        own = {**common, **own}
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(name, **own)
    reference = transformers.AutoModelForCausalLM.from_config(config).eval()
    reference.save_pretrained(tmp_path / "base")
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    x, _ = padded([[5, 6, 7, 8], [9, 10, 11]])
    ids = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 0]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])
    expected = reference(input_ids=ids, attention_mask=mask).logits[mask.bool()]
    model = models.build("causal-lora4:base", SHAPE, 1, seed=0)
    outputs = model(x)[mask.bool()]
    torch.testing.assert_close(outputs, expected, rtol=1e-4, atol=1e-4)
    outputs.square().mean().backward()
    gradients = {n: each.grad for n, each in model.named_parameters() if "lora_B" in n}
    assert gradients
    assert all(each.abs().sum() > 0 for each in gradients.values())


# Commands, report, privacy


def call(*words):
    done = CliRunner().invoke(app, [*map(str, words)], catch_exceptions=False)
    assert not done.exit_code, done.output
    return " ".join(done.output.split())


def test_command_prints_what_of_a_base_model_is_trained():
    shown = call("models", "causal-lora4:gpt2")
    assert "transformer.h.1.attn.c_attn" in shown
    assert "512 parameters are trained and sent" in shown


def test_command_continues_a_prompt(finished):
    expected = finished.generate("client-1", "the cat", max_tokens=8)
    shown = call("generate", finished.directory, "client-1", "--prompt", "the cat", "--tokens", 8)
    assert " ".join(f"the cat{printable_lines(expected)}".split()) in shown


def test_report_contains_generated_texts(home, tmp_path):
    """The prompts are the first 16 tokens of test texts, i.e. 16 bytes of this tokenizer."""
    settings = {**federation(tmp_path, rounds=1).run.flat(), "out": str(tmp_path / "out")}
    done = fedhet.run(settings=settings, progress=False)
    generated = json.loads((tmp_path / "out" / "generated.json").read_text())
    kind, client, texts = (generated[key] for key in ("kind", "client", "texts"))
    assert (kind, client, generated["protocol"]) == ("global", "client-0", "common")
    assert len(texts) == 3
    page = (tmp_path / "out" / "report.html").read_text()
    whole = "".join(f"{TEXTS[k % 4]} {99 - k}" for k in range(9))  # The first 24 tokens are a text.
    for each in texts:
        assert each["prompt"] in whole
        assert html.escape(printable(each["prompt"])) in page
        assert html.escape(printable(each["text"])) in page
    assert texts[0]["prompt"] == whole[:16]
    assert texts[0]["text"] == done.generate(client, whole[:16], kind=kind, max_tokens=48)


def test_private_run_weighs_texts_equally(tmp_path, monkeypatch):
    """The loss of a private client is the mean over texts, and the budget is not exceeded."""
    tasks, original = [], CausalLanguageModeling.loss

    def loss(task, *rest):
        tasks.append(task)
        return original(task, *rest)

    monkeypatch.setattr(CausalLanguageModeling, "loss", loss)
    config = federation(tmp_path, **{"privacy.epsilon": 8.0, "privacy.delta": 1e-3})
    summary = run(config, tmp_path / "out")
    assert tasks
    assert all(each == CausalLanguageModeling().for_sample_gradients() for each in tasks)
    assert all(7.5 < each["epsilon"] <= 8.0 for each in summary["privacy"].values())
    assert not any(each["failed"] for each in records(tmp_path / "out"))


def test_masked_sums_give_the_same_adapters(tmp_path):
    states = []
    for secure in (False, True):
        changes = {"privacy.secure-aggregation": secure, "clients": 3}
        (tmp_path / str(secure)).mkdir()
        config = federation(tmp_path / str(secure), "fedavg", **changes)
        run(config, tmp_path / str(secure) / "out")
        result = fedhet.load(tmp_path / str(secure) / "out")
        states.append(result.model("client-0", "global").extractor.state_dict())
    for name, value in states[0].items():
        torch.testing.assert_close(states[1][name], value, rtol=1e-4, atol=1e-5)


def test_test_texts_need_no_owner(home, tmp_path):
    (tmp_path / "train.csv").write_text("who,text\na,abc\nb,xyz\n")
    (tmp_path / "test.csv").write_text("text\nde\n")
    dataset = read(f"text:{tmp_path}", by="who")
    assert rows_of(dataset.test)[0] == [[*tokens_of(home, "de"), END]]
    (tmp_path / "train.csv").write_text("text\nabc\n")
    with pytest.raises(DataError, match="who"):
        read(f"text:{tmp_path}", by="who")
    lines = tmp_path / "lines"
    lines.mkdir()
    example = {"prompt": "a", "completion": "b"}
    (lines / "train.jsonl").write_text(json.dumps({**example, "who": 1}))
    (lines / "test.jsonl").write_text(json.dumps(example))
    assert len(read(f"instructions:{lines}", by="who").test) == 1
    (lines / "train.jsonl").write_text(json.dumps(example))
    with pytest.raises(DataError, match=r"line 1: data\.by: expected a text or an integer 'who'"):
        read(f"instructions:{lines}", by="who")


def test_report_of_a_private_run_contains_no_texts_of_clients(tmp_path, caplog):
    """Without a common test set, nothing is generated."""
    config = federation(tmp_path, rounds=1, **{"privacy.epsilon": 8.0, "privacy.delta": 1e-3})
    (tmp_path / "test.csv").unlink()
    settings = {**config.run.flat(), "out": str(tmp_path / "out")}
    fedhet.run(settings=settings, progress=False)
    assert not (tmp_path / "out" / "generated.json").exists()
    assert "no text was generated for the report" in caplog.text
