"""The committed model repository: current, consistent, and thin."""

from __future__ import annotations

import asyncio
import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from inflight.tritonserver.config_pbtxt import main, render
from inflight.tritonserver.contract.models import Model
from tests.fakes import fake_pb_utils
from tests.unit.tritonserver.test_preprocessing import save_checkpoint

PYTHON_MODELS = [model for model in Model if model is not Model.ENSEMBLE]


@pytest.fixture
def repository(pytestconfig: pytest.Config) -> Path:
    return pytestconfig.rootpath / "model_repository"


@pytest.fixture
def configs(repository: Path) -> dict[str, Any]:
    """Parsed by NVIDIA's own definition of the file."""
    return {
        model.value: text_format.Parse(
            (repository / model.value / "config.pbtxt").read_text(), model_config_pb2.ModelConfig()
        )
        for model in Model
    }


@pytest.mark.parametrize("model", Model)
def test_the_committed_config_is_the_rendering(model: Model, repository: Path) -> None:
    committed = (repository / model.value / "config.pbtxt").read_text(encoding="utf-8")
    assert committed == render(model), (
        "run python -m inflight.tritonserver.config_pbtxt model_repository"
    )


def test_the_writer_writes_what_it_renders(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path)]) == 0
    assert (tmp_path / "ensemble" / "config.pbtxt").read_text() == render(Model.ENSEMBLE)
    assert len(capsys.readouterr().out.splitlines()) == len(Model)
    assert main([]) == 2


def test_models_are_complete(repository: Path, configs: dict[str, Any]) -> None:
    assert {path.name for path in repository.iterdir() if path.is_dir()} == set(configs)
    for name, config in configs.items():
        assert config.name == name
        assert config.max_batch_size > 0
        assert not config.parameters, "configuration comes from api/config.py"
        assert (repository / name / "1").is_dir()
        if name == "ensemble":
            assert config.platform == "ensemble"
            assert (repository / name / "1" / ".gitkeep").exists(), "git keeps no empty folder"
        else:
            assert config.backend == "python"
            (group,) = config.instance_group
            assert group.kind == model_config_pb2.ModelInstanceGroup.KIND_CPU


def test_only_what_streams_is_decoupled_and_nothing_is_gathered(
    configs: dict[str, Any],
) -> None:
    decoupled = {n for n, c in configs.items() if c.model_transaction_policy.decoupled}
    assert decoupled == {"inflight_llm"}
    assert not [n for n, c in configs.items() if c.HasField("dynamic_batching")]


def test_one_instance_where_order_or_state_needs_it(configs: dict[str, Any]) -> None:
    counts = {n: c.instance_group[0].count for n, c in configs.items() if c.instance_group}
    assert (counts["inflight_llm"], counts["postprocessing"]) == (1, 1)
    assert counts["ensemble_sync"] == 1, (
        "it never waits, and each instance costs a second to unload"
    )


def test_every_input_is_optional(configs: dict[str, Any]) -> None:
    for name, config in configs.items():
        assert config.input, name
        assert [tensor.name for tensor in config.input if not tensor.optional] == []


def test_text_output_comes_first_on_every_public_door(configs: dict[str, Any]) -> None:
    for name in ("inflight_llm", "ensemble", "ensemble_sync"):
        assert configs[name].output[0].name == "text_output"


def test_all_doors_have_the_same_text_contract(configs: dict[str, Any]) -> None:
    def types(tensors: Any) -> dict[str, tuple[int, tuple[int, ...]]]:
        return {tensor.name: (tensor.data_type, tuple(tensor.dims)) for tensor in tensors}

    ensemble, sync = configs["ensemble"], configs["ensemble_sync"]
    assert types(ensemble.input) == types(sync.input)
    assert types(ensemble.output) == types(sync.output)
    engine = types(configs["inflight_llm"].input)
    unlike = {name for name, kind in types(ensemble.input).items() if engine.get(name) != kind}
    assert unlike == {"request_output_len"}, "UINT32 there: llama-index's stop request"
    assert types(ensemble.output).items() <= types(configs["inflight_llm"].output).items()


def test_the_ensemble_uses_and_makes_every_tensor(configs: dict[str, Any]) -> None:
    """What the server checks at load, and that no response can lack an output."""
    ensemble = configs["ensemble"]
    types = {t.name: (t.data_type, tuple(t.dims)) for t in (*ensemble.input, *ensemble.output)}
    used, made = set(), {tensor.name for tensor in ensemble.input}
    for step in ensemble.ensemble_scheduling.step:
        model = configs[step.model_name]
        for tensors, pairs in ((model.input, step.input_map), (model.output, step.output_map)):
            own = {tensor.name: (tensor.data_type, tuple(tensor.dims)) for tensor in tensors}
            for name, ensemble_name in pairs.items():
                assert types.setdefault(ensemble_name, own[name]) == own[name]
        assert set(step.input_map.values()) <= made, "used before it is made"
        used |= set(step.input_map.values())
        made |= set(step.output_map.values())
    assert {tensor.name for tensor in ensemble.input} <= used
    assert {tensor.name for tensor in ensemble.output} <= made


@pytest.mark.parametrize("model", PYTHON_MODELS)
def test_model_files_are_thin(model: Model, repository: Path) -> None:
    lines = (repository / model.value / "1" / "model.py").read_text().splitlines()
    assert len(lines) <= (80 if model is Model.INFLIGHT_LLM else 120)


def load_model(repository: Path, name: str) -> ModuleType:
    path = repository / name / "1" / "model.py"
    spec = importlib.util.spec_from_file_location(f"model_of_{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def arguments(**parameters: str) -> dict[str, str]:
    """What the server gives to ``initialize``."""
    coded = {key: {"string_value": value} for key, value in parameters.items()}
    config = json.dumps({"parameters": coded})
    return {"model_config": config, "model_name": "m", "model_version": "1"}


def test_text_goes_in_and_comes_out_of_the_model_files(repository: Path, tmp_path: Path) -> None:
    checkpoint = str(save_checkpoint(tmp_path))
    first = load_model(repository, "preprocessing").TritonPythonModel()
    first.initialize(arguments(model_dir=checkpoint))
    query = fake_pb_utils.Tensor("QUERY", np.array([[b"a b"]], dtype=object))
    (response,) = first.execute([fake_pb_utils.InferenceRequest(inputs=[query])])
    made = {tensor.name(): tensor.as_numpy() for tensor in response.output_tensors()}

    last = load_model(repository, "postprocessing").TritonPythonModel()
    last.initialize(arguments(model_dir=checkpoint))
    inputs = {
        "TOKENS_BATCH": made["INPUT_ID"][:, None, :],
        "SEQUENCE_LENGTH": made["REQUEST_INPUT_LEN"],
        "PREFIX_TOKENS": np.zeros((1, 0), np.int32),
        "TEXT_LENGTH": np.array([[3]], np.int32),
    }
    tensors = [fake_pb_utils.Tensor(name, array) for name, array in inputs.items()]
    (response,) = last.execute([fake_pb_utils.InferenceRequest(inputs=tensors)])
    assert response.output_tensors()[0].as_numpy().tolist() == [b"a b"]


@pytest.mark.parametrize("name", ["preprocessing", "postprocessing", "inflight_llm"])
def test_a_wrong_configuration_is_one_line_in_the_server_s_log(name: str, repository: Path) -> None:
    model = load_model(repository, name).TritonPythonModel()
    with pytest.raises(fake_pb_utils.TritonModelException, match="no_such_key.*no such key"):
        model.initialize(arguments(no_such_key="1"))


def test_the_engine_model_hands_its_requests_over(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, Any]] = []

    class Service:
        def submit(self, request: Any) -> None:
            calls.append(("submit", request))

        def close(self) -> None:
            calls.append(("close", None))

    def start(parameters: dict[str, str], name: str, version: str) -> Service:
        calls.append(("start", (parameters, name, version)))
        return Service()

    module = load_model(repository, "inflight_llm")
    monkeypatch.setattr(module.LlmService, "start", start)
    model = module.TritonPythonModel()
    model.initialize(arguments(max_batch_size="4"))
    one, two = fake_pb_utils.InferenceRequest(), fake_pb_utils.InferenceRequest()
    assert model.execute([one, two]) is None, "a decoupled model returns nothing"
    model.finalize()
    assert calls == [
        ("start", ({"max_batch_size": "4"}, "m", "1")),
        ("submit", one),
        ("submit", two),
        ("close", None),
    ]


def test_the_unary_model_passes_requests_on(repository: Path) -> None:
    def engine(request: fake_pb_utils.InferenceRequest) -> list[fake_pb_utils.InferenceResponse]:
        text = request.inputs()[0].as_numpy().reshape(-1)
        return [fake_pb_utils.InferenceResponse([fake_pb_utils.Tensor("text_output", text)])]

    fake_pb_utils.bls_models["inflight_llm"] = engine
    model = load_model(repository, "ensemble_sync").TritonPythonModel()
    model.initialize(arguments())
    texts = [np.array([[b"a"]], dtype=object), np.array([[b"b"]], dtype=object)]
    requests = [
        fake_pb_utils.InferenceRequest(
            inputs=[fake_pb_utils.Tensor("text_input", text)],
            requested_output_names=["text_output"],
        )
        for text in texts
    ]

    async def serve() -> None:
        assert await model.execute(requests) is None, "answers go out through the senders"
        await model._service.drain()

    asyncio.run(serve())
    sends = [request.sender.sends for request in requests]
    assert [send.output("text_output").tolist() for (send,) in sends] == [[b"a"], [b"b"]]
    assert all(send.is_final for (send,) in sends)
