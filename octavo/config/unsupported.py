"""Options of vLLM that Octavo knows and does not support yet, each with the reason and what to do instead.

They are refused, never ignored. A name leaves this table when its feature arrives.
"""

import difflib
from collections.abc import Collection, Iterable
from typing import Any

# (reason and what to do, names)
_REFUSED: tuple[tuple[str, str], ...] = (
    (
        "the class of a model follows from its architecture; use hf_overrides to change that",
        "model_class_overrides",
    ),
    (
        "the configuration is read from the model's config.json; use hf_overrides to change it",
        "hf_config_path config_format",
    ),
    (
        "code from the hub is taken at revision",
        "code_revision",
    ),
    (
        "weights are taken from the folder or repository given as model",
        "model_weights ignore_patterns",
    ),
    (
        "weights are streamed from disk by one loader without settings",
        "safetensors_load_strategy safetensors_prefetch_num_threads safetensors_prefetch_block_size "
        "model_loader_extra_config pt_load_map_location max_parallel_loading_workers",
    ),
    (
        "quantised checkpoints other than FP8 and GGUF are not read, and they say themselves how they are quantised",
        "quantization_config allow_deprecated_quantization",
    ),
    (
        "sleep gives all memory back, graphs included, whatever the allocator; use enable_sleep_mode",
        "sleep_mode_offload_cudagraph sleep_preserve_parameter_names enable_cumem_allocator",
    ),
    (
        "extra outputs for reinforcement learning are not produced",
        "enable_return_routed_experts return_sampling_mask enable_trace_replay use_fp64_gumbel "
        "weight_transfer_config aux_output_config",
    ),
    (
        "plugins for prompts in other formats are not loaded",
        "io_processor_plugin renderer_num_workers",
    ),
    (
        "an engine runs on one device; start one server per device and balance between them",
        "data_parallel_size_local data_parallel_start_rank data_parallel_rank data_parallel_address "
        "data_parallel_rpc_port data_parallel_backend data_parallel_hybrid_lb data_parallel_external_lb "
        "data_parallel_multi_port_external_lb dp_sync_interval decode_context_parallel_size "
        "prefill_context_parallel_size dcp_kv_cache_interleave_size cp_kv_cache_interleave_size "
        "dcp_comm_backend dcp_q_replicate enable_dbo ubatch_size dbo_decode_token_threshold "
        "dbo_prefill_token_threshold nnodes node_rank master_addr master_port distributed_timeout_seconds "
        "cpu_distributed_timeout_seconds disable_custom_all_reduce disable_nccl_for_dp_synchronization "
        "ray_workers_use_nsight device_ids worker_cls worker_extension_cls enable_fault_tolerance "
        "fault_tolerance_config headless api_server_count",
    ),
    (
        "the process may be bound from outside, with numactl or taskset",
        "numa_bind numa_bind_nodes numa_bind_cpus",
    ),
    (
        "experts are not spread over devices",
        "enable_expert_parallel all2all_backend enable_eplb eplb_config expert_placement_strategy "
        "enable_elastic_ep elastic_ep_max_dp_size enable_ep_weight_filter moe_backend",
    ),
    (
        "the KV cache keeps every layer in one data type",
        "kv_cache_dtype_skip_layers",
    ),
    (
        "the scales of an 8-bit KV cache are the checkpoint's, or 1",
        "calculate_kv_scales",
    ),
    (
        "prefixes are hashed in one way",
        "prefix_caching_hash_algo prefix_cache_retention_interval prefix_match_unit",
    ),
    (
        "weights and KV cache stay on the device; choose a smaller model, or a shorter max_model_len",
        "kv_offloading_size kv_offloading_backend cpu_offload_gb cpu_offload_params offload_backend "
        "offload_group_size offload_num_in_group offload_prefetch_step offload_params swap_space",
    ),
    (
        "state-space models are not served",
        "mamba_cache_dtype mamba_ssm_cache_dtype mamba_block_size mamba_cache_mode mamba_backend mamba_config "
        "gdn_prefill_backend kda_prefill_backend kda_decode_backend",
    ),
    (
        "KV cache is not shared between layers",
        "kv_sharing_fast_prefill",
    ),
    (
        "there is one scheduler; use max_num_seqs, max_num_batched_tokens and long_prefill_token_threshold",
        "scheduler_cls max_num_active_seqs max_num_scheduled_tokens long_prefill_token_threshold_adaptive "
        "scheduler_reserve_full_isl watermark prefill_schedule_interval disable_hybrid_kv_cache_manager "
        "performance_mode",
    ),
    (
        "graph sizes are set in compilation_config",
        "cudagraph_capture_sizes max_cudagraph_capture_size",
    ),
    (
        "kernels are chosen per operator with op_providers, and attention with attention_backend",
        "attention_config kernel_config linear_backend ir_op_priority enable_flashinfer_autotune",
    ),
    (
        "platform plugins take no extra settings",
        "additional_config",
    ),
    (
        "LoRA adapters are not served; merge the adapter into the model",
        "enable_lora max_loras max_lora_rank max_cpu_loras lora_dtype fully_sharded_loras lora_target_modules "
        "default_mm_loras lora_modules",
    ),
    (
        "only text is accepted as input",
        "limit_mm_per_prompt language_model_only mm_encoder_only skip_mm_profiling mm_processor_kwargs "
        "media_io_kwargs mm_processor_cache_gb mm_processor_cache_type mm_encoder_tp_mode "
        "mm_encoder_attn_backend interleave_mm_strings enable_mm_embeds video_pruning_rate "
        "allowed_local_media_path allowed_media_domains disable_chunked_mm_input trust_request_mm_kwargs",
    ),
    (
        "reasoning formats of your own are rows in the file of tool_parser_plugin",
        "reasoning_parser_plugin reasoning_config",
    ),
    (
        "calls are constrained where a request forces them, by tool_choice, and the server calls no tools itself",
        "tool_strict_level tool_server",
    ),
    (
        "speculative decoding is not available",
        "speculative_config spec_method spec_model spec_tokens",
    ),
    (
        "answers are not watermarked",
        "watermark_config",
    ),
    (
        "one span is made for each request; use otlp_traces_endpoint alone",
        "collect_detailed_traces",
    ),
    (
        "this metric is not collected",
        "kv_cache_metrics kv_cache_metrics_sample custom_histogram_buckets cudagraph_metrics enable_mfu_metrics",
    ),
    (
        "set the environment variables OCTAVO_LOG_LEVEL and OCTAVO_LOG_FORMAT instead",
        "logging_config log_level log_config_file",
    ),
    (
        "the KV cache does not leave the engine",
        "kv_transfer_config kv_events_config ec_transfer_config ec_manager_config",
    ),
    (
        "middleware is not loaded; put a proxy in front of the server",
        "middleware",
    ),
    (
        "certificates are read once; restart the server to change them",
        "enable_ssl_refresh",
    ),
    (
        "use disable_uvicorn_access_log",
        "disable_access_log_for_endpoints",
    ),
    (
        "answers are not logged; use enable_log_requests for the requests",
        "enable_log_outputs enable_log_deltas log_error_stack",
    ),
    (
        "use the metrics endpoint",
        "enable_per_request_metrics",
    ),
    (
        "this route is not served",
        "enable_tokenizer_info_endpoint enable_offline_docs",
    ),
    (
        "the server's name for its settings is fixed",
        "fingerprint_mode fingerprint_value",
    ),
    (
        "the HTTP parser's limits are fixed",
        "h11_max_incomplete_event_size h11_max_header_count",
    ),
    (
        "this option had no effect any more; leave it out",
        "disable_cascade_attn use_v2_block_manager num_scheduler_steps",
    ),
)

UNSUPPORTED: dict[str, str] = {name: reason for reason, names in _REFUSED for name in names.split()}


def explain_unknown(name: str, known: Iterable[str], value: Any = True) -> str | None:
    """What to tell someone who used an option that is not `known`; None when it is switched off anyway.

    `name` is spelled with underscores.
    """
    reason = UNSUPPORTED.get(name)
    if reason is not None:
        if value is None or value is False or value in (0, "") or (isinstance(value, Collection) and not value):
            return None
        return f"{name} is not supported yet: {reason}."
    close = difflib.get_close_matches(name, list(known), n=3, cutoff=0.6)
    hint = f"did you mean {' or '.join(close)}?" if close else "see --help for what there is."
    return f"there is no option {name}; {hint}"
