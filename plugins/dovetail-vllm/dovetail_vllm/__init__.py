"""Verified weight transfer for vLLM: back ends that check a sum of every tensor before it is loaded."""


def register() -> None:
    """Called by vLLM in each of its processes, through the entry point group vllm.general_plugins; may be called again."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory as Factory

    for name, engine in (
        ("dovetail_file", "FileEngine"),
        ("dovetail_nccl", "GroupEngine"),
        ("dovetail_ipc", "MemoryEngine"),
    ):
        try:
            Factory.register_engine(name, "dovetail_vllm.engines", engine)
        except ValueError as error:  # vLLM's word for a name that it has
            if "already registered" not in str(error):
                raise
