"""Fields of the configs of each form: those that a reader honours, and those that change nothing that is computed.

They are those of the libraries' own classes, over all versions. `require_known` in `common.py` refuses any other.
"""

from collections.abc import Mapping

SAE_LENS_TRAINING = """
    act_store_device activations_mixing_fraction adam_beta1 adam_beta2 autocast autocast_lm aux_loss_coefficient
    b_dec_init_method cached_activations_path checkpoint_path compile_llm compile_sae context_size dataset_path
    dataset_trust_remote_code dead_feature_estimation_method dead_feature_threshold dead_feature_window
    decoder_heuristic_init decoder_heuristic_init_norm decoder_init_norm decoder_orthogonal_init device
    disable_concat_sequences dtype eval_batch_size_prompts eval_every_n_wandb_logs exclude_special_tokens
    expansion_factor feature_reinit_scale feature_sampling_method feature_sampling_window finetuning_method
    finetuning_scaling_factor finetuning_tokens from_pretrained_path hf_hook_name hf_hook_name_out hook_eval hook_layer
    hook_point_eval hook_point_layer init_encoder_as_decoder_transpose is_dataset_tokenized jumprelu_bandwidth
    jumprelu_init_threshold jumprelu_sparsity_loss_mode jumprelu_ste_to_input jumprelu_tanh_scale l0_coefficient
    l0_warm_up_steps l1_coefficient l1_warm_up_steps llm_compilation_mode llm_device log_activations_store_to_wandb
    log_optimizer_state_to_wandb log_to_wandb logger lp_norm lr lr_decay_steps lr_end lr_scheduler_name
    lr_warm_up_steps matryoshka_widths model_class_name model_from_pretrained_kwargs model_kwargs model_name
    mse_loss_normalization n_batches_for_norm_estimate n_batches_in_buffer n_checkpoints n_eval_batches
    n_restart_cycles neuronpedia_id noise_scale normalize_sae_decoder output_path pre_act_loss_coefficient
    prefetch_llm_batches prepend_bos resample_batches resume resume_from_checkpoint run_name sae_compilation_mode
    sae_lens_training_version sae_lens_version save_final_checkpoint scale_sparsity_penalty_by_decoder_norm seed
    seqpos_slice sequence_separator_token store_batch_size store_batch_size_prompts streaming target_l0
    tokens_per_buffer topk_threshold_lr total_training_tokens train_batch_size train_batch_size_tokens
    training_tokens use_cached_activations use_chat_formatting use_ghost_grads use_matryoshka_aux_loss
    use_sparse_activations verbose wandb_entity wandb_id wandb_log_frequency wandb_project
"""

FIELDS: Mapping[str, tuple[str, str]] = {
    "cfg.json of SAELens": (
        """
        activation_fn activation_fn_kwargs activation_fn_str apply_b_dec_to_input architecture d_in d_sae d_out
        hook_head_index hook_name hook_name_out hook_point hook_point_head_index k max_iterations metadata
        normalize_activations rescale_acts_by_decoder_norm reshape_activations residual_threshold
        stop_on_duplicate_support
        """,
        SAE_LENS_TRAINING,
    ),
    "cfg.json of sparsify": (
        "activation k num_latents signed skip_connection transcode",
        "d_in expansion_factor multi_topk normalize_decoder",
    ),
    "config.json of dictionary_learning": ("trainer buffer", ""),
    "trainer in config.json": (
        "dict_class k submodule_name",
        """
        activation_dim activation_queue_length adaptive_sparsity_penalty anneal_start auxk_alpha bandwidth decay_start
        device dict_size gp_reg_coeff group_fractions group_sizes group_weights l0_penalty l1_penalty
        lambda_warm_steps layer lm_name lr n_sparsity_updates p_end p_start resample_steps seed sparsity_coefficient
        sparsity_function sparsity_loss_queue_length sparsity_penalty sparsity_queue_length sparsity_warmup_steps steps
        steps_before_annealing target_l0 threshold_beta threshold_start_step top_k_aux trainer_class wandb_name
        warmup_steps weights_temperature
        """,
    ),
    "buffer in config.json": (
        "io",
        "ctx_len d_submodule device layer n_ctxs out_batch_size refresh_batch_size",
    ),
    "config.json of Gemma Scope 2": (
        "affine_connection architecture hf_hook_point_in hf_hook_point_out type",
        "l0 model_name width",
    ),
    "config.yaml of circuit-tracer": (
        "activation activation_function feature_input_hook feature_output_hook k model_kind transcoders",
        "model_name repo_id revision scan subfolder",
    ),
    "config of Llama Scope": (
        """
        act_fn apply_decoder_bias_to_pre_encoder d_model d_sae dataset_average_activation_norm expansion_factor hook_point_in
        hook_point_out jump_relu_threshold norm_activation sae_type sparsity_include_decoder_norm use_glu_encoder
    """,
        """
        bias_init_method ddp_size decoder_exactly_fixed_norm device dtype force_unit_decoder_norm init_decoder_norm
        init_encoder_norm init_encoder_with_decoder_transpose jumprelu_threshold_window k_warmup_steps l1_coefficient
        l1_coefficient_warmup_steps lp sae_pretrained_name_or_path seed sparsity_threshold_for_triton_spmm_kernel
        strict_loading top_k tp_size use_batch_norm_mse use_decoder_bias use_ghost_grads use_triton_kernel
    """,
    ),
}
