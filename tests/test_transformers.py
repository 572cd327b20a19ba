"""Hugging Face's models and data sets, made here and saved as they are on the hub."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from posthoc import DataError, FileError, OptionError, Outputs
from posthoc.integrations.datasets import StreamedRows, open_data
from tests.collecting_cases import assert_close, collected, expected, images, outputs, predictor, raw, write_parquet

ROWS = 5


@pytest.fixture(scope="module")
def hub(tmp_path_factory) -> Path:
    """Tiny models saved as they are on the hub: a vision transformer, and a BERT with a vocabulary of four words."""
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("hub")
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    small, side = {**sizes, "num_labels": 3}, images(1)[0].width
    with torch.random.fork_rng():
        torch.manual_seed(0)
        vit = transformers.ViTForImageClassification(transformers.ViTConfig(**small, image_size=side, patch_size=4))
        settings = transformers.BertConfig(**small, vocab_size=6, max_position_embeddings=6)
        bert = transformers.BertForSequenceClassification(settings)
        headless = transformers.BertModel(settings)
    vit.save_pretrained(folder / "vit")
    transformers.ViTImageProcessor(size={"height": side, "width": side}).save_pretrained(folder / "vit")
    words = {word: i for i, word in enumerate(["[PAD]", "[UNK]", "one", "two", "three", "four"])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]")
    for name, model in [("bert", bert), ("headless", headless), ("unsafe", bert)]:
        model.save_pretrained(folder / name)
        fast.save_pretrained(folder / name)
    headless.config.architectures = ["BertForSequenceClassification"]
    headless.config.save_pretrained(folder / "headless")
    torch.save(bert.state_dict(), folder / "unsafe" / "pytorch_model.bin")
    (folder / "unsafe" / "model.safetensors").unlink()
    return folder


@pytest.mark.parametrize("own_weights", [False, True])
def test_a_hugging_face_image_classifier(hub, tmp_path, own_weights):
    from transformers import ViTForImageClassification

    net = ViTForImageClassification.from_pretrained(hub / "vit").eval()
    if own_weights:
        nn.init.ones_(net.classifier.bias)
        save_file(net.state_dict(), tmp_path / "own.safetensors")
    opened = predictor(f"hf:{hub / 'vit'}", weights=str(tmp_path / "own.safetensors") if own_weights else None)
    found = outputs(opened, images(ROWS))
    with torch.no_grad():
        x = (raw(ROWS) - 0.5) / 0.5  # the images have the network's size, so that only the values change
        features = net.vit(x).last_hidden_state[:, 0]
        assert_close(found, Outputs(net(x).logits, None, features), "outputs", "features")
    assert opened.identity.items() >= {"predictor": "hf:vit", "layer": "input of classifier"}.items()


def test_a_hugging_face_text_classifier(hub):
    from transformers import BertForSequenceClassification

    opened = predictor(f"hf:{hub / 'bert'}", layer="bert.pooler")
    found = outputs(opened, ["one two", "three", "four five one one one one one"])
    net = BertForSequenceClassification.from_pretrained(hub / "bert").eval()
    with torch.no_grad():
        rows = [[2, 3], [4], [5, 1, 2, 2, 2, 2]]  # the last is cut to the six positions that there are
        answers = [net(torch.tensor([row])).logits for row in rows]
        pooled = [net.bert(torch.tensor([row])).pooler_output for row in rows]
    assert_close(found, Outputs(torch.cat(answers), None, torch.cat(pooled)), "outputs", "features")


@pytest.mark.parametrize(
    ("name", "inputs", "error", "message"),
    [
        ("headless", [], FileError, "found none for classifier"),
        ("unsafe", [], FileError, "safetensors"),
        ("", [], FileError, "Expected a model of the Hugging Face hub or its folder"),
        ("vit", ["one"], DataError, "Expected an image a row for this predictor, got text"),
        ("bert", [], DataError, "Expected text a row for this predictor, got an image"),
    ],
)
def test_hugging_face_models_that_cannot_be_used_are_refused(hub, name, inputs, error, message):
    with pytest.raises(error, match=message):
        outputs(predictor(f"hf:{hub / name}"), inputs or images(1))


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """The same rows as a data set saved to disk, as one of several splits, and as files in a folder."""
    datasets = pytest.importorskip("datasets")
    folder = tmp_path_factory.mktemp("datasets")
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(num_classes=3)})
    labels = [row % 3 for row in range(2 * ROWS)]
    whole = datasets.Dataset.from_dict({"image": images(2 * ROWS), "label": labels}, features)
    whole.save_to_disk(folder / "mapped")
    datasets.DatasetDict({"train": whole, "test": whole.select(range(ROWS))}).save_to_disk(folder / "splits")
    (folder / "files").mkdir()
    for part in range(2):
        whole.shard(2, part, contiguous=True).to_parquet(folder / "files" / f"train-{part:05}-of-00002.parquet")
    return folder


@pytest.mark.parametrize(
    ("name", "rows", "workers"),
    [("mapped", 10, 2), ("splits:train", 10, 0), ("splits:test", 5, 0), ("files", 10, 0), ("files", 10, 2)],
)
def test_hugging_face_data_sets(saved, tmp_path, name, rows, workers):
    found = collected(open_data(f"hf:{saved}/{name}"), tmp_path / "o", workers=workers)
    assert_close(found, expected(raw(rows), torch.arange(rows) % 3), "outputs", "features", "targets")


def test_a_streamed_data_set_is_resumed_at_its_row(saved, tmp_path):
    data = open_data(f"hf:{saved}/files:train")
    assert isinstance(data, StreamedRows)
    rest = list(data.skip(ROWS + 1))
    assert [label for _, label in rest] == [row % 3 for row in range(ROWS + 1, 2 * ROWS)]
    assert rest[0][0].tobytes() == images(ROWS + 2)[-1].tobytes()
    write_parquet(tmp_path / "train.parquet", {"x": [1.0] * 9 + [None]})
    with pytest.raises(DataError, match="in column 'x' of row 9"):
        list(open_data(f"hf:{tmp_path}").skip(6))


def test_hugging_face_data_sets_have_an_identity(saved):
    names = ["mapped", "splits:train", "splits:test", "files"]
    found = [open_data(f"hf:{saved}/{name}").identity for name in names]
    found.append(open_data(f"hf:{saved}/mapped", input_columns=["label"], target_column="label").identity)
    assert all(found.count(identity) == 1 for identity in found)
    assert open_data(f"hf:{saved}/mapped").identity == found[0]


def test_hugging_face_data_sets_that_cannot_be_used_are_refused(saved, tmp_path):
    for name, splits in [("splits", "train, test, got None"), ("files:test", "train, got"), ("mapped:train", "none")]:
        with pytest.raises(OptionError, match=f"Expected one of the splits {splits}"):
            open_data(f"hf:{saved}/{name}")
    with pytest.raises(FileError, match="Expected a data set on the Hugging Face hub or a folder of one"):
        open_data(f"hf:{tmp_path}")
