"""``--additional-config '{"npu_prep": {...}}'`` and what start-up decides from it."""

import pytest

from tests.helpers.plain_words import PYDANTICS_WORDS
from vllm_npu_prep.attention.families import KERNEL_FAMILIES
from vllm_npu_prep.config import PrepConfig, decide, parse_config
from vllm_npu_prep.errors import PrepError
from vllm_npu_prep.prep.mask import MaskForm


def decisions(max_num_batched_tokens=512, max_model_len=512, **options):
    config = PrepConfig(**options)
    return decide(config, "cpu", KERNEL_FAMILIES, max_num_batched_tokens, max_model_len)


def test_nothing_given_means_defaults():
    assert parse_config({}) == parse_config(None) == parse_config({"other": 1}) == PrepConfig()


def test_keys_are_read():
    given = {"mask": "compressed", "mask_budget_bytes": 1 << 20, "triton_kernels": "keep"}
    given["check"] = "full"
    parsed = parse_config({"npu_prep": given}).model_dump()
    assert parsed.pop("fused") == {"off": []}
    defaults = {"attention": "auto", "record": None}
    defaults |= {"probe": True, "kernel_rules": "release", "cpu_binding": True}
    defaults |= {"scheduler": "batched", "verified": None, "mc2": "auto"}
    assert parsed == {**defaults, **given}


def test_steps_to_record_are_read():
    record = parse_config({"npu_prep": {"record": {"dir": "/tmp/r", "steps": "100:200"}}}).record
    assert (record.span, record.last, record.request_ids) == (range(100, 200), 0, "hashed")
    record = parse_config({"npu_prep": {"record": {"dir": "/tmp/r"}}}).record
    assert (record.span, record.last, record.max_bytes) == (None, 64, 256 << 20)


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        ({"npu_prep": {"maks": "dense"}}, ['"maks"', 'did you mean "mask"', "mask_budget_bytes"]),
        ({"npu_prep": {3: "dense"}}, ['"npu_prep.3" = 3: ']),
        ({"npu_prep": {"zzz": 1}}, ['"zzz"', "allowed: attention, mask, mask_budget_bytes"]),
        ({"npu_prep": {"mask": "sparse"}}, ['npu_prep.mask" = "sparse"', '"dense" or "comp']),
        ({"npu_prep": {"mask": 3}}, ['npu_prep.mask" = 3: must be "auto"']),
        (
            {"npu_prep": {"mask_budget_bytes": "1GB"}},
            ['npu_prep.mask_budget_bytes" = "1GB": must be a whole number'],
        ),
        (
            {"npu_prep": {"mask_budget_bytes": -1}},
            ['npu_prep.mask_budget_bytes" = -1: must be at least 16,384'],
        ),
        ({"npu_prep": {"triton_kernels": True}}, ['triton_kernels" = true:', '"keep"']),
        ({"npu_prep": {"record": {"steps": "0:9"}}}, ['"npu_prep.record.dir" is missing']),
        (
            {"npu_prep": {"record": {"dir": "r", "step": "0:9"}}},
            [
                '"npu_prep.record" has no key "step"',
                'did you mean "steps"',
                "dir, steps, max_bytes",
            ],
        ),
        *(
            (
                {"npu_prep": {"record": {"dir": "r", "steps": steps}}},
                ["npu_prep.record.steps", says],
            )
            for steps, says in [
                ("9:9", '"100:200", or "last 64"'),
                ("last", '"last 64"'),
                ("last 0", '"last 64"'),
                ("-1:4", '"100:200"'),
                ("1:2\n", '"100:200"'),
                (64, "= 64: must be text"),
            ]
        ),
        (
            {"npu_prep": {"record": {"dir": "", "steps": "0:9"}}},
            ['npu_prep.record.dir" = "": must not be empty'],
        ),
        (
            {"npu_prep": {"record": {"dir": "r", "max_bytes": 1}}},
            ['npu_prep.record.max_bytes" = 1: must be at least 65,536'],
        ),
        (
            {"npu_prep": {"record": "r"}},
            ['npu_prep.record" = "r": must be an object with keys among dir, steps, max_bytes'],
        ),
        ({"npu_prep": {"check": "yes"}}, ["npu_prep.check", '"cheap"', '"full"']),
        ({"npu_prep": []}, ["object", "not []"]),
        ({"npu-prep": {}}, ['unknown section "npu-prep"', 'write "npu_prep"']),
    ],
)
def test_bad_keys_and_values_are_named(given, parts):
    with pytest.raises(PrepError) as error:
        parse_config(given)
    assert "\n" not in str(error.value)
    for part in parts:
        assert part in str(error.value)
    assert not PYDANTICS_WORDS.search(str(error.value))


def test_cpu_takes_the_first_family_that_takes_the_masks():
    assert decisions().attention == decisions(mask="compressed").attention == "compiled"
    assert decisions().mask_form == MaskForm.COMPRESSED
    assert decisions(mask="dense").attention == "reference"
    assert decisions(attention="reference").mask_form == MaskForm.DENSE


def test_dense_masks_beyond_the_budget_become_compressed():
    sizes = {"max_num_batched_tokens": 8192, "max_model_len": 131072}
    decided = decisions(**sizes, attention="reference")
    assert decided.mask_form == MaskForm.COMPRESSED
    assert decided.dense_bytes == (8192 + 131072) * 131072
    assert "mask_budget_bytes" in decided.note


def test_explicit_dense_masks_beyond_the_budget_are_refused():
    with pytest.raises(PrepError, match="raise mask_budget_bytes"):
        decisions(max_num_batched_tokens=8192, max_model_len=131072, mask="dense")


@pytest.mark.parametrize("name", ["fia", "atb"])
def test_a_family_of_another_device_is_refused(name):
    with pytest.raises(PrepError, match=f'"{name}" does not run on device type "cpu"'):
        decisions(attention=name)
