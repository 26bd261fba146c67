"""All that we rely on in vLLM: what `compat` reads, what the rest of the plugin calls, and how vLLM calls us."""

from __future__ import annotations

from tests.contract.source import Source
from tests.contract.terms import Arguments, Call, Members, Names, Strings, Term

_RUNNER = "vllm.v1.worker.gpu_model_runner"
_SAMPLER = "vllm.v1.sample.rejection_sampler"

CONTRACT: tuple[Term, ...] = (
    # How vLLM makes our proposer and calls it.
    Strings("vllm.config.speculative", ("custom_class",)),
    Strings("vllm.plugins", ("vllm.general_plugins",)),
    Names("vllm.v1.spec_decode.custom_class_proposer", ("create_custom_proposer",)),
    Arguments("vllm.v1.spec_decode.custom_class_proposer", "create_custom_proposer", ("vllm_config",)),
    Call(
        _RUNNER,
        "GPUModelRunner.propose_draft_token_ids",
        "propose",
        (
            "sampled_token_ids",
            "self.input_batch.num_tokens_no_spec",
            "self.input_batch.token_ids_cpu",
            "slot_mappings=slot_mappings",
        ),
        branch="custom_class",
    ),
    Call(_RUNNER, "GPUModelRunner.load_model", "load_model", ("self.model",)),
    Call("vllm.v1.worker.cpu_model_runner", "CPUModelRunner.load_model", "load_model", ("self.model",)),
    # The runner: the method that is wrapped, and what is read from it.
    Arguments(_RUNNER, "GPUModelRunner.execute_model", ("scheduler_output",)),
    Members(_RUNNER, "GPUModelRunner", ("drafter", "input_batch", "requests", "execute_model_state", "device")),
    Members(_RUNNER, "ExecuteModelState", ("sample_hidden_states", "spec_decode_metadata")),
    Members("vllm.v1.spec_decode.metadata", "SpecDecodeMetadata", ("num_draft_tokens",)),
    Members("vllm.v1.worker.gpu_input_batch", "InputBatch", ("req_ids", "request_lora_mapping", "all_greedy")),
    Members("vllm.v1.worker.gpu_input_batch", "CachedRequestState", ("mm_features", "sampling_params")),
    Members(
        "vllm.v1.core.sched.output",
        "SchedulerOutput",
        ("scheduled_new_reqs", "scheduled_spec_decode_tokens", "num_scheduled_tokens", "finished_req_ids"),
    ),
    Members(
        "vllm.v1.core.sched.output",
        "NewRequestData",
        ("req_id", "prompt_token_ids", "lora_request", "mm_features", "sampling_params"),
    ),
    Names("vllm.distributed.parallel_state", ("get_tp_group", "get_pp_group")),
    Members("vllm.distributed.parallel_state", "GroupCoordinator", ("is_first_rank", "is_last_rank")),
    # The target as a model.
    Members("vllm.model_executor.models.interfaces", "EagleModelMixin", ("aux_hidden_state_layers",)),
    Members("vllm.model_executor.models.llama", "LlamaModel", ("layers", "start_layer")),
    Members("vllm.model_executor.models.llama", "LlamaForCausalLM", ("embed_input_ids",)),
    # Configuration.
    Members(
        "vllm.config.vllm",
        "VllmConfig",
        (
            "model_config",
            "parallel_config",
            "speculative_config",
            "compilation_config",
            "device_config",
            "additional_config",
        ),
    ),
    Members("vllm.config.speculative", "SpeculativeConfig", ("num_speculative_tokens",)),
    Members("vllm.config.compilation", "CompilationConfig", ("cudagraph_mode",)),
    Members("vllm.config.compilation", "CUDAGraphMode", ("separate_routine", "has_full_cudagraphs")),
    Members(
        "vllm.config.model",
        "ModelConfig",
        (
            "model",
            "dtype",
            "max_model_len",
            "enforce_eager",
            "served_model_name",
            "get_vocab_size",
            "get_hidden_size",
            "get_total_num_hidden_layers",
        ),
    ),
    Members("vllm.config.parallel", "ParallelConfig", ("data_parallel_index", "tensor_parallel_size", "use_ubatching")),
    Members("vllm.config.device", "DeviceConfig", ("device_type",)),
    # The sampler on the CPU, for the workarounds.
    Names("vllm.platforms", ("current_platform",)),
    Members("vllm.platforms.interface", "Platform", ("is_cpu", "is_cuda", "has_device_capability")),
    Names(_SAMPLER, ("apply_top_k_top_p",)),
    Arguments(_SAMPLER, "sample_recovered_tokens", ("draft_token_ids",)),
    Arguments(_SAMPLER, "expand_batch_to_tokens", ("x", "cu_num_tokens", "num_tokens", "replace_from", "replace_to")),
    # An engine in our process, and its workers.
    Strings("vllm", ("LLM", "SamplingParams")),
    Names("vllm", ("__version__",)),
    Members("vllm.entrypoints.llm", "LLM", ("llm_engine", "get_metrics", "get_tokenizer")),
    Arguments("vllm.entrypoints.llm", "LLM.collective_rpc", ("method", "args")),
    Members("vllm.v1.engine.core_client", "InprocClient", ("shutdown",)),
    Members("vllm.v1.worker.cpu_worker", "CPUWorker", ("model_runner",)),
    Members("vllm.v1.worker.gpu_worker", "Worker", ("model_runner",)),
    Members(
        "vllm.v1.engine.llm_engine",
        "LLMEngine",
        ("vllm_config", "engine_core", "has_unfinished_requests", "step", "abort_request"),
    ),
    Arguments("vllm.v1.engine.llm_engine", "LLMEngine.add_request", ("request_id", "prompt", "params")),
    Members("vllm.sampling_params", "StructuredOutputsParams", ("json",)),
    Members("vllm.sampling_params", "RequestOutputKind", ("DELTA",)),
    Members(
        "vllm.sampling_params",
        "SamplingParams",
        ("output_kind", "structured_outputs", "thinking_token_budget", "extra_args"),
    ),
    Members("vllm.outputs", "CompletionOutput", ("token_ids", "text", "finish_reason", "logprobs")),
    Members("vllm.outputs", "RequestOutput", ("request_id", "outputs", "finished")),
    Members("vllm.logprobs", "Logprob", ("logprob",)),
    Members("vllm.v1.metrics.reader", "Metric", ("name",)),
    Members("vllm.v1.metrics.reader", "Counter", ("value",)),
    Strings(
        "vllm.v1.spec_decode.metrics",
        ("vllm:spec_decode_num_draft_tokens", "vllm:spec_decode_num_accepted_tokens"),
    ),
    # The server: its command line, flags, variables and processes.
    Names("vllm.entrypoints.cli.main", ("main",)),
    Strings(
        "vllm.engine.arg_utils",
        (
            "--additional-config",
            "--data-parallel-size",
            "--distributed-executor-backend",
            "--gpu-memory-utilization",
            "--kv-cache-memory-bytes",
            "--pipeline-parallel-size",
            "--served-model-name",
            "--speculative-config",
            "--tensor-parallel-size",
        ),
    ),
    Strings(
        "vllm.envs",
        (
            "VLLM_BATCH_INVARIANT",
            "VLLM_CPU_KVCACHE_SPACE",
            "VLLM_CPU_OMP_THREADS_BIND",
            "VLLM_ENABLE_V1_MULTIPROCESSING",
            "VLLM_LOGGING_LEVEL",
            "VLLM_TARGET_DEVICE",
        ),
    ),
    Strings("vllm.v1.utils", ("ApiServer_",)),
)

# Model Runner V2 with the n-gram method, whose place our speculator takes: since 0.32.
_NGRAM = "vllm.v1.worker.gpu.spec_decode.ngram.speculator"
V2_CONTRACT: tuple[Term, ...] = (
    Members("vllm.config.vllm", "VllmConfig", ("__post_init__", "use_v2_model_runner")),
    Members("vllm.config.speculative", "SpeculativeConfig", ("method", "model", "enable_adaptive_verification")),
    Members("vllm.config.parallel", "ParallelConfig", ("prefill_context_parallel_size",)),
    Strings("vllm.config.speculative", ("ngram_gpu",)),
    Arguments("vllm.v1.worker.gpu.spec_decode", "init_speculator", ("vllm_config", "device", "req_states")),
    Names("vllm.v1.worker.gpu.model_runner", ("init_speculator",)),
    Members(
        "vllm.v1.worker.gpu.spec_decode.speculator", "BaseSpeculator", ("init_cudagraph_manager", "capture", "propose")
    ),
    Arguments(
        "vllm.v1.worker.gpu.spec_decode.speculator",
        "BaseSpeculator.propose",
        ("input_batch", "num_sampled", "last_sampled", "dummy_run", "num_speculative_tokens"),
    ),
    Members(
        "vllm.v1.worker.gpu.model_runner",
        "GPUModelRunner",
        ("speculator", "lora_state", "encoder_cache", "take_draft_token_ids"),
    ),
    Arguments("vllm.v1.worker.gpu.model_runner", "GPUModelRunner.execute_model", ("scheduler_output",)),
    Members(
        "vllm.v1.worker.gpu.states", "RequestState", ("max_num_reqs", "max_model_len", "total_len", "all_token_ids")
    ),
    Members("vllm.v1.worker.gpu.buffer_utils", "StagedWriteTensor", ("gpu",)),
    Members("vllm.v1.worker.gpu.input_batch", "InputBatch", ("req_ids", "num_reqs", "idx_mapping", "idx_mapping_np")),
    Members("vllm.v1.worker.gpu.lora_utils", "LoraState", ("lora_ids",)),
    Members("vllm.v1.worker.gpu.mm.encoder_cache", "EncoderCache", ("mm_features",)),
    Strings("vllm.v1.worker.gpu.warmup", ("_warmup_", "_v2_mixed_warmup")),
    Members("vllm.v1.core.sched.output", "NewRequestData", ("req_id",)),
    Members("vllm.v1.outputs", "DraftTokenIds", ("req_ids", "draft_token_ids")),
    Members("vllm.distributed.parallel_state", "GroupCoordinator", ("broadcast",)),
)


def missing(source: Source) -> list[str]:
    """What this vLLM does not have; empty if it keeps the contract."""
    terms = CONTRACT + V2_CONTRACT if source.module(_NGRAM) else CONTRACT
    return [name for term in terms for name in term.missing(source)]
