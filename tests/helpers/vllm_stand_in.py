"""A stand-in for what our plugin uses of vLLM, and a server around the plugin that speaks vLLM's RL router strictly.

Not vLLM: `tests/helpers/vllm_signatures.json`, recorded from the published source of 0.32.0 and 0.33.0, is what it is checked
against, and tests/soak runs the same pushes against a real one. As a program it serves until its standard input ends:
`python -m tests.helpers.vllm_stand_in dovetail_nccl`.
"""

import hashlib
import importlib
import json
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Generic, TypeVar
from urllib.parse import parse_qs, urlsplit

import torch
from torch import Tensor, nn

TInitInfo = TypeVar("TInitInfo")
TUpdateInfo = TypeVar("TUpdateInfo")
PLUGIN = Path(__file__).parents[2] / "plugins" / "dovetail-vllm"
BASE, FACTORY, RELOAD = (
    "vllm.distributed.weight_transfer.base",
    "vllm.distributed.weight_transfer",
    "vllm.model_executor.model_loader.reload",
)
FUSED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}


def install_plugin(site: Path) -> None:
    """What `pip install dovetail-vllm` leaves for vLLM to see; its modules are in PLUGIN."""
    info = site / "dovetail_vllm-0.1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: dovetail-vllm\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text(
        "[vllm.general_plugins]\ndovetail = dovetail_vllm:register\n"
    )


@dataclass
class WeightTransferInitInfo(ABC):  # noqa: B024
    pass


@dataclass
class WeightTransferUpdateInfo(ABC):  # noqa: B024
    pass


class WeightTransferEngine(ABC, Generic[TInitInfo, TUpdateInfo]):
    init_info_cls: type[Any]
    update_info_cls: type[Any]

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: Any) -> None:
        self.config, self.vllm_config, self.device, self.model = config, vllm_config, device, model
        self.parallel_config, self.model_config = (
            vllm_config.parallel_config,
            vllm_config.model_config,
        )

    def parse_init_info(self, init_dict: dict[str, Any]) -> Any:
        try:
            return self.init_info_cls(**init_dict)
        except TypeError as error:
            raise ValueError(f"Invalid init_info: {error}") from error

    def parse_update_info(self, update_dict: dict[str, Any]) -> Any:
        try:
            return self.update_info_cls(**update_dict)
        except TypeError as error:
            raise ValueError(f"Invalid update_info: {error}") from error

    @abstractmethod
    def init_transfer_engine(self, init_info: Any) -> None: ...

    @abstractmethod
    def start_weight_update(self) -> None: ...

    @abstractmethod
    def finish_weight_update(self) -> None: ...

    @abstractmethod
    def update_weights(self, update_info: dict[str, Any]) -> None: ...

    @abstractmethod
    def receive_weights(self, update_info: Any) -> None: ...

    @abstractmethod
    def shutdown(self) -> None: ...


class WeightTransferEngineFactory:
    _registry: dict[str, Callable[[], type[Any]]] = {}

    @classmethod
    def register_engine(
        cls, name: str, module_path_or_cls: Any, class_name: str | None = None
    ) -> None:
        if name in cls._registry:
            raise ValueError(f"Weight transfer engine '{name}' is already registered.")
        assert class_name is not None
        cls._registry[name] = lambda: vars(importlib.import_module(module_path_or_cls))[class_name]


class Model(nn.Module):
    """Parameters as vLLM names them. While it reloads it keeps the tensors it got, as vLLM does, and the first of each."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        rows: dict[str, list[tuple[str, tuple[int, ...]]]] = {}
        for name, shape in shapes.items():
            rows.setdefault(target_of(name), []).append((name, shape))
        self.parts = {whole: [name for name, _ in parts] for whole, parts in rows.items()}
        self.values = {
            whole: torch.zeros(sum(shape[0] for _, shape in parts), *parts[0][1][1:])
            for whole, parts in rows.items()
        }
        self.loading: dict[str, Tensor] | None = None

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, Any]]:
        yield from self.values.items()

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        assert self.loading is not None
        loaded = set()
        for name, tensor in weights:
            assert tensor.dtype is not torch.uint8, name
            self.loading.setdefault(name, tensor)  # vLLM ignores what comes after a layer is full
            loaded.add(target_of(name))
        return loaded


def target_of(name: str) -> str:
    for part, whole in FUSED.items():
        name = name.replace(f".{part}.", f".{whole}.")
    return name


def initialize_layerwise_reload(model: Any) -> None:
    if model.loading is None:  # layers that are still loading are left as they are
        model.loading = {}


def finalize_layerwise_reload(*args: Any, **kwargs: Any) -> None:  # noqa: ARG001  # as vLLM's
    model = args[0]
    for whole, parts in model.parts.items():
        if all(part in model.loading for part in parts):
            model.values[whole] = torch.cat([model.loading[part] for part in parts])
    model.loading = None


def install(put: Callable[[Any, str, Any], None]) -> None:
    """put(mapping, key, value): as monkeypatch.setitem."""
    for name in dict.fromkeys(
        leaf.rsplit(".", i)[0]
        for leaf in (BASE, FACTORY, RELOAD)
        for i in range(leaf.count(".") + 1)
    ):
        put(sys.modules, name, ModuleType(name))
    for name, values in (
        (BASE, (WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo)),
        (FACTORY, (WeightTransferEngineFactory,)),
        (RELOAD, (initialize_layerwise_reload, finalize_layerwise_reload)),
    ):
        vars(sys.modules[name]).update({value.__name__: value for value in values})


def make_engine(backend: str, model: Any) -> Any:
    importlib.import_module("dovetail_vllm").register()
    parallel = SimpleNamespace(data_parallel_index=0, world_size=1, rank=0)
    config = SimpleNamespace(
        parallel_config=parallel, model_config=SimpleNamespace(quantization=None)
    )
    return WeightTransferEngineFactory._registry[backend]()(
        None, config, torch.device("cpu"), model
    )


class Worker:
    """The session of an update, as vLLM's worker keeps it."""

    def __init__(self, backend: str, model: Model) -> None:
        self.model, self.engine, self.active, self.version, self.paused = (
            model,
            make_engine(backend, model),
            False,
            "default",
            False,
        )

    def init(self, info: dict[str, Any]) -> None:
        self.engine.init_transfer_engine(self.engine.parse_init_info(info))

    def start(self) -> None:
        if self.active:
            raise RuntimeError(
                "start_weight_update called while a weight update is already active."
            )
        self.engine.start_weight_update()
        self.active = True

    def update(self, info: Any) -> None:
        if not self.active:
            raise RuntimeError("start_weight_update must be called before update_weights.")
        try:
            self.engine.update_weights(info[0] if isinstance(info, list) else info)
        except BaseException:
            self.active = False
            raise

    def finish(self, version: str | None) -> None:
        if not self.active:
            raise RuntimeError(
                "finish_weight_update called without a matching start_weight_update."
            )
        self.engine.finish_weight_update()
        self.active = False
        self.version = version or self.version


class Server(ThreadingHTTPServer):
    """faults: (path, nth call of it) -> what happens instead, with the handler; calls: paths in order."""

    daemon_threads = True

    def __init__(self, backend: str, shapes: dict[str, tuple[int, ...]]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.worker = Worker(backend, Model(shapes))
        self.faults: dict[tuple[str, int], Callable[[Any], None]] = {}
        self.calls: list[str] = []
        self.url = f"http://127.0.0.1:{self.server_port}"

    def values(self) -> dict[str, Tensor]:
        return self.worker.model.values


class _Handler(BaseHTTPRequestHandler):
    protocol_version, disable_nagle_algorithm = "HTTP/1.1", True
    server: Server

    def do_GET(self) -> None:
        self._answer({})

    def do_POST(self) -> None:
        text = self.rfile.read(int(self.headers.get("content-length", 0)))
        self._answer(json.loads(text) if text else {})

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _answer(self, body: dict[str, Any]) -> None:
        parts = urlsplit(self.path)
        self.server.calls.append(parts.path)
        fault = self.server.faults.pop((parts.path, self.server.calls.count(parts.path)), None)
        try:
            if fault is not None:
                fault(self)
            status, value = (
                200,
                self._route(
                    parts.path, {k: v[0] for k, v in parse_qs(parts.query).items()}, **body
                ),
            )
        except (RuntimeError, ValueError, TypeError, OSError) as error:
            status, value = (
                500,
                {
                    "error": {
                        "message": f"Call failed: {error}",
                        "type": "InternalServerError",
                        "code": 500,
                    }
                },
            )
        text = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def _route(self, path: str, query: dict[str, str], **body: Any) -> dict[str, Any]:
        worker = self.server.worker
        routes: dict[str, Callable[..., Any]] = {
            "/pause": lambda: vars(worker).update(paused=query["mode"] == "keep"),
            "/resume": lambda: vars(worker).update(paused=False),
            "/init_weight_transfer_engine": lambda init_info: worker.init(init_info),
            "/start_weight_update": worker.start,
            "/update_weights": lambda update_info: worker.update(update_info),
            "/finish_weight_update": lambda weight_version=None: worker.finish(weight_version),
            "/weight_info": lambda: {"weight_version": worker.version},
            "/get_world_size": lambda: {"world_size": 1},
            "/weight_checker": lambda action: (
                {"checksums": digests(worker.model)} if action == "checksum" else {}
            ),
        }
        return routes[path](**body) or {"message": "done"}


def digests(model: Model) -> dict[str, str]:
    return {
        f"dp0:pp0:pcp0:tp0:{name}": hashlib.sha256(
            bytes(value.contiguous().view(-1).view(torch.uint8).tolist())
        ).hexdigest()
        for name, value in model.values.items()
    }


@contextmanager
def serving(backend: str, shapes: dict[str, tuple[int, ...]]) -> Iterator[Server]:
    server = Server(backend, shapes)
    thread = threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
    )
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        server.worker.engine.shutdown()


if __name__ == "__main__":
    sys.path.insert(0, str(PLUGIN))
    install(lambda mapping, key, value: mapping.__setitem__(key, value))
    backend, shapes = sys.argv[1], json.loads(sys.argv[2])
    with serving(backend, {name: tuple(shape) for name, shape in shapes.items()}) as server:
        sys.stdout.write(server.url + "\n")
        sys.stdout.flush()
        sys.stdin.read()
