"""Ordinary mistakes of users.

Each mistake must raise an error of this package that names the given value. It must not raise an
error of Python itself, which gives no advice.

The table has one line for each mistake: the call, the class of the error, and words of its message.
"""

import builtins
import copy
import re

import numpy as np
import pytest
import torch
from torch import nn

import hooks
import interp
import models
from hooks import HookedRunner, HookError, HookPoint, Mode
from interp import directions, store
from interp.directions import Direction
from tests import tiny
from tests.count import ROOT
from tests.shipped import pydoc

MISTAKES = r"""
activation_patching(model, pairs, source=cache)                  | TypeError | source must be a model.*edits.replace
activation_patching(model, pairs, pos=[10, 13])                  | TypeError | pos=; .*spans.*over=.*select.*sweep
attribution_patching(model, pairs, positions=-1)                 | TypeError | positions=; .*spans.*over=.*select.*sweep
activation_patching(model, pairs, ['z', 'mlp_out'])              | TypeError | mlp_out.*each site.*sweep
interp.splice(model, sae, use_error_term=False)                  | TypeError | use_error_term=; use error=None
features.Dictionary(eye, eye, eye[0], eye[0], nn.ReLU(), hook_name='embed') | TypeError | hook_name=; use reads=
directions.steering_curve(model, Direction({}), [TEXT], [0.5], None, layer=2) | TypeError | layer=; .*vectors.at
path_patching(model, pairs, receivers=(3, 1))                    | UnknownNameError | this head a3.h1<q>.*is named .3, 1
path_patching(model, pairs, senders=(3, 1))                      | UnknownNameError | this head a3.h1.*is named .3, 1
activation_patching(model, pairs, 'zz')                          | UnknownNameError | 'zz'; close matches: z$
activation_patching(model, pairs, 'attn.zz')                     | UnknownNameError | 'attn.zz'; close matches: attn.z
activation_patching(model, pairs, 'patern')                      | UnknownNameError | 'patern'; close matches: pattern$
edits.zero(heads=3)                                              | UnknownNameError | 'heads'; close matches: head
models.attach(nn.Linear(3, 3))                                   | AttachError | Linear has no nn.Embedding.*example={'input': tensor}
runner.run_with_cache(TEXT, pos=-1)                              | TypeError | a cache keeps the axis pos; got -1 .write pos=.-1.
runner.run_with_hooks(TEXT, hooks={'embed': lambda value, point: value[:, :2]}) | EditError | shape .1, 18, 128.; got .1, 2, 128.$
runner.run_with_cache(TEXT, names=[])                            | UnknownNameError | at least one hook point
runner.run_with_cache(TEXT, names='patern')                      | UnknownNameError | 'patern'; close matches: .*pattern
sweep(model, pairs, {'blocks.0.attn.z': edits.zero()})            | TypeError | names to runs; got one mapping; write .edits.
sweep(model, pairs, {0: {'blocks.0.attn.z': edits.zero()}})      | TypeError | names of runs must be texts; got 0
runner.run_with_cache(TEXT, names='decoder.z')                   | UnknownNameError | 'decoder.z'; close matches: blocks.0.attn.z
runner.run_with_hooks(TEXT, hooks={'blocks.1.mlp.post': edits.project_out(torch.ones(512), d_mlp=3)}) | EditError | 1 numbers here; got 512 .*edits.zero
runner(TEXT, hooks={'embed': edits.zero()})                      | TypeError | hooks=; write runner.run_with_hooks
store.harvest(runner, [TEXT], 'nowhere', 'embed')                | TypeError | HookedRunner.*runner.model
interp.over_examples(activation_patching, runner, pairs)         | TypeError | HookedRunner.*runner.model
interp.diffing.compare_models(runner, model, [TEXT])             | TypeError | tuned must be a model.*HookedRunner
interp.diffing.compare_models([runner], model, [TEXT])           | TypeError | HookedRunner.*.model
cache['attn', 1]                                                 | UnknownNameError | attn_out.*pattern.*z
interp.rank_correlation(torch.ones(3, 2), torch.ones(3, 2, 1))   | ValueError | .3, 2. and .3, 2, 1. .*result.mean
interp.rank_correlation(activation_patching(model, pairs), 3)    | TypeError | Result; result.mean
activation_patching(model, pairs)[0]                             | TypeError | .values.*layer.*.select
interp.steering_vector                                           | AttributeError | difference_of_means
interp.features.StandardSAE                                      | AttributeError | interp.features.Dictionary
directions.probe(model, ([TEXT], [TEXT]), layers=[1])            | TypeError | layers=; .*site=.'blocks
directions.difference_of_means(model, ([TEXT], [TEXT]), layers=[1]) | TypeError | layers=; .*site=.'blocks
interp.direct_logit_attribution(model, cache, right='a', by='head') | TypeError | by=; .*.by..head
Direction({'blocks.1.resid_post': torch.ones(2), 'blocks.3.resid_post': torch.ones(2)})[99] | UnknownNameError | in layer 99; its layers are 1, 3
runner.run_with_cache(TEXT, names=sae)                           | TypeError | its name; got a Dictionary .*splice
runner.run_with_hooks(TEXT, hooks={sae: edits.zero()})           | TypeError | its name; got a Dictionary .*splice
logit_lens(model, TEXT)                                         | TypeError | 'def f.*run_with_cache
logit_lens(model, logits)                                       | TypeError | tensor .1, 18, 103
logit_lens(model, tokens)                                       | TypeError | tensor .1, 18
logit_lens(model, runner)                                       | TypeError | HookedRunner
logit_lens(model, model)                                        | TypeError | Transformer
logit_lens(model, None)                                         | TypeError | None
logit_lens(model, dict(cache))                                  | TypeError | a dict
logit_lens(cache, model)                                        | TypeError | ActivationCache.*after the model
logit_lens(TEXT, cache)                                         | TypeError | 'def f.*models.load
logit_lens(runner, cache)                                       | TypeError | HookedRunner
logit_lens(model)                                               | TypeError | cache
logit_lens(model, cache, topk=3)                                | TypeError | topk=.*top_k
decompose(model, TEXT)                                          | TypeError | 'def f.*run_with_cache
decompose(model, logits)                                        | TypeError | run_with_cache
accuracy('a', 'b')                                              | TypeError | 'b'.*no wrong answer
logit_diff('a', 'b', 'c')                                       | TypeError | position.*'c'
accumulated_logits(model, TEXT, right='a')                             | TypeError | run_with_cache
apply_norm(model, TEXT, logits, 0)                              | TypeError | run_with_cache
head_scores(model, TEXT, 'induction')                           | TypeError | run_with_cache
head_scores(model, cache, 'inducton')                           | UnknownNameError | inducton.*induction
logit_lens(model, cache, top_k='3')                             | TypeError | '3'
logit_lens(model, cache, top_k=0)                               | ValueError | 0
apply_norm(model, cache, cache['resid_post', 1], '0')           | TypeError | 0 to 3
head_scores(model, cache, np.ones((18, 18)))                    | TypeError | float64 array
copying_scores(model, cache)                                    | TypeError | fold.*ActivationCache
interp.residual_stream(cache, 'x')                              | TypeError | windows.*'x'
singular_tokens(model, 1, 99)                                   | ValueError | head.*99
singular_tokens(model, 1, 4)                                    | ValueError | head.*3; got 4
token_directions(model, None)                                   | TypeError | None
svd_targets(model, TEXT)                                        | TypeError | run_with_cache
svd_targets(model, cache, which='wvwo')                         | TypeError | which=
direct_logit_attribution(model, TEXT, right='a')                | TypeError | run_with_cache
direct_logit_attribution(model, cache, right='not one token')   | ValueError | not one token
attention_attribution(model, TEXT, (1, 0))                                | TypeError | run_with_cache
attention_attribution(model, cache, 'a1.h0')                              | TypeError | a1.h0
expert_load(model, TEXT)                                        | TypeError | run_with_cache
interp.residual_stream(model, TEXT)                             | TypeError | Transformer
interp.svd_spectra(model)                                           | TypeError | svd_targets
spectral.effective_rank(TEXT)                                   | TypeError | 'def f
attribution_graph(model, TEXT, 'pydoc-4l/transcoders')          | TypeError | load_transcoders.'pydoc-4l/transcoders'
attribution_graph(model, TEXT, None)                            | TypeError | None
attribution_graph(model, TEXT, {'blocks.0.mlp_out': TEXT})      | TypeError | blocks.0.mlp_out
attribution_graph(model, TEXT, sae)                             | ValueError | blocks.2.resid_post
attribution_graph(TEXT, model, transcoders)                     | TypeError | 'def f
faithfulness(model, pairs, ['m0->logits'])                      | TypeError | m0->logits.*Circuit
faithfulness(model, pairs, 'm0->logits')                        | TypeError | m0->logits
evaluate_circuit(model, pairs, ['m0->logits'])                  | TypeError | Circuit
evaluate_circuit(model, pairs, effects)                         | TypeError | Result
circuits.greedy(model, effects, 20)                             | TypeError | graph must.*Transformer.*Graph.model
circuits.top(graph, TEXT, 20)                                   | TypeError | scores
circuits.random(model, 5)                                       | TypeError | Graph
Circuit(model, ['m0->logits'])                                  | TypeError | Graph
Circuit(graph, 'm0->logits')                                    | TypeError | m0->logits
Circuit(graph, ['m0'])                                          | ValueError | m0
Circuit(graph, ['m0->m9'])                                      | UnknownNameError | m9
circuit_auroc(effects, TEXT)                                            | TypeError | known
compare_effects(effects, TEXT)                                          | TypeError | estimate
compare_effects(model, effects)                                         | TypeError | exact
path_patching(model, pairs, receivers=[(3, 2)])                 | UnknownNameError | a3.h2<q>
path_patching(model, pairs, receivers=['a3.h2'])                | UnknownNameError | a3.h2<
path_patching(model, pairs, receivers=3)                        | TypeError | 3
edge_attribution(model, TEXT)                                   | TypeError | Pairs.clean
activation_patching(model, TEXT, 'z')                           | TypeError | Pairs.clean
activation_patching(model, (TEXT, TEXT), 'z')                   | TypeError | Pairs
activation_patching(model, pairs, 'attn')                       | UnknownNameError | attn_out
activation_patching(model, pairs, 'zz')                         | UnknownNameError | zz
activation_patching(model, pairs, 3)                            | TypeError | 3
activation_patching(model, pairs, 'z', metric=TEXT)             | TypeError | metric=
activation_patching(model, pairs, 'z', last_only=True)          | TypeError | last_only=.*Pairs\(..., last_only=
attribution_patching(model, pairs, spans={'a': 'def'})          | TypeError | spans=.*Pairs\(..., spans=
activation_patching(model, Pairs(TEXT, TEXT + 's', ('a', 'b'))) | ValueError | spans=.'name'.*last_only=True
activation_patching(model, Pairs(TEXT, TEXT, ('a', 'b'), spans={'a': ('def', 'return')})) | ValueError | 3 and 6.*Pairs.*last_only=True
activation_patching(model, pairs, 'z', direction='denoise')     | ValueError | denoising
activation_patching(model, pairs, 'z', over='haed')             | ValueError | haed
activation_patching(model, pairs, 'z', site_='z')               | TypeError | site_=
activation_patching(model, pairs, 'z', over=3)                  | TypeError | over.*3
activation_patching(model, pairs, 'z', max_bytes='1GB')         | TypeError | '1GB'
Pairs(cache, cache, ('a', 'b'))                                 | TypeError | ActivationCache
node_effects(model, pairs, 3)                                   | TypeError | source.*3
run_circuit(model, pairs, 3)                                    | TypeError | Circuit.*3
edge_patching(model, pairs, [3])                                | TypeError | m0->logits.*3
acdc(model, pairs, '0.1')                                       | TypeError | numbers above 0
circuit_curve(model, pairs, effects, 3)                                 | TypeError | Graph.*Result
activation_patching(pairs, model, 'z')                          | TypeError | Pairs
activation_patching(runner, pairs, 'z')                         | TypeError | HookedRunner
activation_patching('gpt2', pairs, 'z')                         | TypeError | models.load.'gpt2'
attribution_patching(model, TEXT)                               | TypeError | Pairs
integrated_gradients(model, pairs, steps=0)                     | ValueError | 0
node_effects(model, TEXT)                                       | TypeError | Pairs
sweep(model, TEXT, edits.zero())                                | TypeError | Edit
sweep(model, TEXT, [edits.zero()])                              | TypeError | blocks
sweep(model, pairs, [])                                         | ValueError | none
measure(logits, logit_diff(1, 2))                               | TypeError | tensor .1, 18, 103.*TokenMetric
measure(model, logit_diff(1, 2), logits)                        | TypeError | Transformer
measure(logit_diff(1, 2), TEXT)                                 | TypeError | 'def f
measure(logit_diff(1, 2), logits, TEXT)                         | TypeError | attention_mask
measure('logit_diff', logits)                                   | TypeError | 'logit_diff'
measure(lambda logits: logits, logits)                          | ValueError | 1, 18, 103
logit_diff(1, 2)(logits.numpy())                                | TypeError | array.*model.texts
logit_diff(1, 2)(logits[0])                                     | ValueError | 18, 103.*model.texts
accuracy(1)(TEXT)                                               | TypeError | 'def f
log_prob(5)(model)                                              | TypeError | Transformer
logit_diff('a', 'b')(logits.clone())                            | ValueError | measure.*model=model
log_prob(None)                                                  | TypeError | None
log_prob(1.5)                                                   | TypeError | float
kl_divergence(TEXT)                                             | TypeError | logits
Pairs(clean=TEXT, corrupt=TEXT)                                 | TypeError | corrupt=.*corrupted
Pairs(3, 4, ('a', 'b'))                                         | TypeError | 3
Pairs(TEXT, TEXT, ('a', 'b'), metric='logit_diff')              | TypeError | 'logit_diff'
max_activating(TEXT, model, 'blocks.0.mlp.post')                | TypeError | 'def f
token_directions(model, 99999)                                  | ValueError | 99999
token_directions(model, TEXT)                                   | ValueError | 18
composition_scores(model, 'x')                                  | ValueError | 'x'
ov_circuit(TEXT)                                                | TypeError | 'def f
repeated_tokens(model, 4)                                       | TypeError | Transformer
repeated_tokens(9, 0)                                           | ValueError | 0
interp.run_with_cache(TEXT, model)                              | TypeError | 'def f
hooks_name('zzz')                                               | UnknownNameError | zzz
hooks_name(3)                                                   | TypeError | 3
load_sae(None)                                                  | TypeError | None
load_sae(model)                                                 | TypeError | Transformer
load_sae('pydoc-4l/nope/nope')                                  | UnknownNameError | pydoc-4l/resid_post
load_sae('pydoc-4l/transcoders')                                | ValueError | load_transcoders.'pydoc-4l/transcoders'
load_transcoders('pydoc-4l/resid_post')                         | ValueError | load_sae.'pydoc-4l/resid_post'
load_transcoders(None)                                          | TypeError | None
evaluate_sae(model, 'pydoc-4l/transcoders', [TEXT])             | TypeError | load_
load_sae('no_such_folder')                                      | FileNotFoundError | no_such_folder
load_sae('pydoc-4l/resid_post', dtype='float16')                | TypeError | float16
evaluate_sae(model, 'pydoc-4l/resid_post', [TEXT])              | TypeError | load_sae
evaluate_sae(model, sae, [])                                    | ValueError | no text
spliced(model, 'pydoc-4l/resid_post')                           | TypeError | load_sae
spliced(model, None)                                            | TypeError | None
spliced(model, {'nope': sae})                                   | UnknownNameError | nope
spliced(model, {'blocks.0.mlp_out': model})                     | TypeError | Transformer
features.feature_cards(model, sae, [TEXT], [99999])             | ValueError | 99999
features.feature_cards(model, sae, [TEXT], 3)                   | TypeError | 3
features.feature_cards(model, sae, [TEXT], ['a'])               | ValueError | 'a'
features.feature_cards(model, 'x', [TEXT], [1])                 | TypeError | 'x'
sae(TEXT)                                                       | TypeError | 'def f
sae.encode(cache['resid_post', 2][..., :5])                     | ValueError | 5
sae.decode(None)                                                | TypeError | 1024.*None
sae.decode(eye)                                                 | ValueError | 1024.*3, 3
load_sae('pydoc-4l/resid_post', devic='cpu')                    | TypeError | devic=
named_in_splice(model, sae, 'blocks.2.features')                | UnknownNameError | features'; close matches: blocks.2.resid_post.features$
named_in_splice(model, sae, 'blocks.9.resid_post')              | UnknownNameError | layers 0 to 3; got 9
features.feature_cards(model, sae, [TEXT], [1], k='3')          | TypeError | '3'
interp.splice(model, sae, error_term=True)                      | TypeError | error_term=
attribution_graph(model, TEXT, transcoders, targets=3.5)        | TypeError | 3.5
features.Dictionary.load('folder')                               | AttributeError | load_sae.folder
features.Dictionary.from_pretrained('release', 'id')             | AttributeError | load_sae.path
sae.save_model('folder')                                         | AttributeError | sae.save.folder
features.Dictionary(1, 2, 3, 4, nn.ReLU())                      | TypeError | W_enc
features.Dictionary(eye, eye, eye[0], eye[0], 'relu')           | TypeError | 'relu'
models.load(transformers_model)                                 | TypeError | GPT2LMHeadModel.*attach
models.load(model)                                              | TypeError | loaded already
models.load(None)                                               | TypeError | None
models.load('pydoc-5l')                                         | FileNotFoundError | pydoc-4l
models.load('')                                                 | FileNotFoundError | ''
models.load('pydoc-4l', dtype='float16')                        | TypeError | 'float16'
models.load('pydoc-4l', dtype=np.float32)                       | TypeError | float32
models.load('pydoc-4l', device='cudaa')                         | ValueError | cudaa
models.load('pydoc-4l', device=3.5)                             | TypeError | 3.5
models.load_tokenizer(model)                                    | TypeError | Transformer
models.attach('gpt2')                                           | TypeError | models.load.'gpt2'
models.attach(None)                                             | TypeError | None
models.attach(cache)                                            | TypeError | ActivationCache
models.attach(model)                                            | TypeError | already has points
models.detach('gpt2')                                           | TypeError | 'gpt2'
models.from_hf('gpt2')                                          | TypeError | 'gpt2'
models.from_hf(model)                                           | TypeError | Transformer
models.from_transformer_lens('gpt2')                            | TypeError | 'gpt2'
models.save(model, 'folder')                                    | TypeError | Transformer
models.save('folder', TEXT)                                     | TypeError | 'def f
models.verify(TEXT)                                             | TypeError | 'def f
models.fold_norms(TEXT)                                         | TypeError | 'def f
models.center(None)                                             | TypeError | None
models.build('gpt3')                                            | UnknownNameError | gpt2
models.Transformer('gpt2')                                      | TypeError | 'gpt2'
models.Transformer({'n_layers': 1})                             | TypeError | a dict
models.Transformer.from_pretrained('gpt2')                      | AttributeError | models.load
models.TransformerConfig(n_layer=1)                             | TypeError | n_layer=.*n_layers
models.TransformerConfig(d_vocab=5)                             | TypeError | vocab_size
models.TransformerConfig()                                      | TypeError | vocab_size
models.TrainingConfig(step=3)                                   | TypeError | step=.*steps
models.next_token_loss(logits, TEXT)                            | TypeError | 'def f
models.next_token_loss(TEXT, tokens)                            | TypeError | model.tokens
models.next_token_loss(logits, tokens[:, :3])                   | ValueError | 1, 3.*1, 18, 103
models.evaluate(model, TEXT)                                    | TypeError | 'def f.*encode
models.evaluate(None, tokens)                                   | TypeError | None
models.train_test_split(None)                                              | TypeError | None
models.train(model, TEXT, models.TrainingConfig(steps=1))       | TypeError | 'def f.*encode
models.generate_text(model, TEXT, max_new_tokens=2, stop='zzz') | TypeError | 'zzz'.*
models.Attention(None)                                          | TypeError | TransformerConfig
models.MLP(3)                                                   | TypeError | TransformerConfig
models.load('pydoc-4l', devic='cpu')                            | TypeError | devic=.*device
models.attach(transformers_model, TEXT)                         | TypeError | attach.model, \*, tokenizer
model(tokens, attention_mask='x')                               | TypeError | 'x'
model(tokens, attention_mask=np.ones((1, 18)))                  | TypeError | float64 array
model(tokens, kv_cache=3)                                       | TypeError | KVCache.. makes
model(np.ones((1, 18)))                                         | TypeError | float64 array .18.
model.unembed(tokens)                                           | TypeError | stream .batch, pos, 128
model.unembed(None)                                             | TypeError | None
model.to_id(3)                                                  | TypeError | 3
models.generate_text(model, TEXT, max_new_tokens=2, do_sample=True) | TypeError | do_sample=.*temperature
models.generate_text(model, TEXT, max_new_tokens=2, temprature=1) | TypeError | temprature=.*temperature
models.generate(model, TEXT, max_new_tokens=2, do_sample=True)  | TypeError | do_sample=
models.generate(model, TEXT, max_new_tokens='3')                | TypeError | '3'
models.generate('gpt2', TEXT, max_new_tokens=2)                 | TypeError | 'gpt2'
models.generate_steps(model, TEXT, max_new_tokens=2, do_sample=True)    | TypeError | do_sample=
models.chat(model, {'role': 'user', 'content': 'hi'})           | TypeError | role
models.chat(model, 'hi')                                        | TypeError | 'hi'
models.chat(model, None)                                        | TypeError | None
models.chat(model, [{'role': 'user'}])                          | ValueError | role
models.CharTokenizer(3)                                         | TypeError | 3
model(TEXT, return_type='loss')                                 | TypeError | return_type=
model(TEXT, stop_at_layer=2)                                    | TypeError | stop_at_layer=.*capture
model(TEXT, prepend_bos=True)                                   | TypeError | prepend_bos=.*bos
model.to_tokens(TEXT, prepend_bos=True)                         | TypeError | prepend_bos=.*bos
model.run_with_cache(TEXT)                                      | AttributeError | HookedRunner
model.to_str_tokens(TEXT)                                       | AttributeError | to_pieces
model.to_pieces(None)                                           | TypeError | whole
model.to_id('zzzz')                                             | ValueError | zzzz
model(3)                                                        | TypeError | 3
model(tokens.float())                                           | TypeError | float32
HookedRunner('gpt2')                                            | TypeError | models.load.'gpt2'
HookedRunner(None)                                              | TypeError | None
HookedRunner(runner)                                            | TypeError | HookedRunner
HookedRunner(cache)                                             | TypeError | ActivationCache
HookedRunner.from_pretrained('gpt2')                            | AttributeError | from_pretrained.*models.load
runner.cfg                                                      | AttributeError | config
runner.run_with_cach                                            | AttributeError | run_with_cache
runner.run_with_hooks(TEXT, {'embed': edits.zero()})            | TypeError | hooks=
runner.run_with_hooks(TEXT, [('embed', edits.zero())])          | TypeError | hooks=
runner.run_with_hooks(TEXT, hooks=edits.zero())                 | TypeError | an Edit
runner.run_with_hooks(TEXT, hooks=lambda value, point: value)   | TypeError | function
runner.run_with_hooks(TEXT, hooks='embed')                      | TypeError | 'embed'
runner.run_with_hooks(TEXT, hooks=['embed'])                    | TypeError | 'embed'
runner.run_with_hooks(TEXT, hooks={'*.z': [edits.zero(), edits.zero()]}) | TypeError | list of 2.*pairs
runner.run_with_hooks(TEXT, hooks={'*.z': None})                | TypeError | None
runner.run_with_hooks(TEXT, hooks={'embed': lambda value: value}) | TypeError | value
runner.run_with_hooks(TEXT, hooks={'embed': lambda value, point: (value, value)}) | EditError | a tuple of 2
runner.run_with_hooks(TEXT, hooks={'embed': lambda value, point: value.detach().numpy()}) | EditError | float32 array .1, 18, 128
runner.run_with_hooks(TEXT, hooks={'embed': lambda value, point: value[:, :2]}) | EditError | 1, 2, 128
runner.run_with_hooks(TEXT, fwd_hooks=[('embed', edits.zero())]) | TypeError | fwd_hooks=.*hooks=
runner.run_with_hooks(TEXT, hooks={'embed': edits.zero(head=1)}) | UnknownNameError | head
runner.run_with_hooks(TEXT, hooks={'*.z': edits.zero(head=77)}) | SelectionError | 77
runner.run_with_hooks(TEXT + ' + 1', hooks={'embed': edits.replace(cache)}) | EditError | 22.*18.*source_pos
runner.run_with_hooks(TEXT, hooks={'embed': edits.add(torch.ones(5))}) | EditError | 128.*5
runner.hooks(edits.zero())                                      | TypeError | an Edit
runner.add(edits.zero())                                        | TypeError | an Edit
runner.run_with_cache(TEXT, 'full')                             | TypeError | mode=
runner.run_with_cache()                                         | TypeError | tokens
runner.run_with_cache(TEXT, return_type='logits')               | TypeError | return_type=
runner.run_with_cache(TEXT, stop_at_layer=2)                    | TypeError | stop_at_layer=.*capture
runner.run_with_cache(TEXT, names_filter='embed')               | TypeError | names=
runner.run_with_cache(TEXT, name='embed')                       | TypeError | name=.*names
runner.run_with_cache(TEXT, names='embedd')                     | UnknownNameError | embedd.*embed
runner.run_with_cache(TEXT, names=3)                            | TypeError | 3
runner.run_with_cache(TEXT, mode='fulll')                       | ValueError | fulll
runner.run_with_cache(TEXT, positions=[1])                      | TypeError | positions=; use pos=
edits.mean(cache, over='pos')                                   | TypeError | over=.*across=
runner.run_with_cache(TEXT, pos='last')                   | TypeError | 'last'
runner.run_with_cache(TEXT, dtype='float16')                    | TypeError | torch.float16
runner.run_with_cache(TEXT, max_bytes='1GB')                    | TypeError | '1GB'
runner.run_with_cache(TEXT, run='generate')                     | TypeError | 'generate'
runner.run_with_cache(cache)                                    | ValueError | ActivationCache
runner.add('embed', edits.zero())                               | TypeError | HookedRunner.add.hooks
runner.hooks('embed', edits.zero())                             | TypeError | HookedRunner.hooks.hooks
runner.capture(tokens)                                          | TypeError | 'names'
HookedRunner(transformers_model).run_with_cache(TEXT)           | TypeError | no text.*'def f.*pass tokens
hooks.position_offset('a')                                      | TypeError | 'a'
runner.run_with_cache(None)                                     | TypeError | None
runner.run_with_cache([[1, 'a']])                               | TypeError | 'a'
runner.run_with_cache(torch.rand(2, 3))                         | TypeError | float32
cache['patern', 1]                                              | UnknownNameError | patern.*pattern
cache['pattern', 9]                                             | UnknownNameError | 0 to 3; got 9
cache['pattern']                                                | UnknownNameError | blocks.0.attn.pattern
cache['pattern', '1']                                           | TypeError | '1'
cache[3]                                                        | TypeError | 3
cache.at(batch=5)                                               | SelectionError | batch.*5
cache.at(pos='last')                                            | TypeError | 'last'
cache.stack('patern')                                           | UnknownNameError | pattern
cache.remove_batch_dim()                                        | AttributeError | cache.at
cache.save(3)                                                   | TypeError | 3
hooks.ActivationCache.load(3)                                   | TypeError | 3
edits.zero(3)                                                   | TypeError | 3.*
edits.zero(heads=3)                                             | UnknownNameError | heads.*head
edits.zero(head='3')                                            | TypeError | '3'
edits.scale('2')                                                | TypeError | '2'
edits.add(torch.ones(128), strength=2)                          | TypeError | edits.add takes no argument strength=; use scale=
edits.add(torch.ones(128), scale=2).at(alpha=2)                 | TypeError | alpha=; use scale=
edits.noise(1.0, std=2)                                         | TypeError | std=; use scale=
edits.add(np.ones(128))                                         | TypeError | float64 array .128
edits.add('embed')                                              | TypeError | 'embed'
edits.add([1.0, 2.0])                                           | TypeError | as_tensor
edits.replace(TEXT)                                             | TypeError | 'def f
edits.mean(cache, across=3)                                     | TypeError | 3
edits.noise('a')                                                | TypeError | 'a'
edits.noise(1.0, seed='a')                                      | TypeError | 'a'
edits.interchange(cache, 'pca')                                 | TypeError | columns.*'pca'
edits.interchange(cache, np.eye(3))                             | TypeError | float64 array
edits.mean(cache, attention_mask=np.ones(3))                    | TypeError | float64 array
edits.resample(cache, 'a')                                      | TypeError | 'a'
edits.all_but([1, 2])                                           | TypeError | all_but.7, 9.
edits.ablate                                                    | AttributeError | no attribute 'ablate'
edits.project_out(TEXT)                                         | TypeError | 'def f
store.harvest(model, [TEXT], '*.pattern', 'folder')             | ValueError | pattern.*statistics
store.harvest(model, 'a', 'embed', 'folder')                    | ValueError | 'a'
store.harvest(TEXT, model, 'embed', 'folder')                   | TypeError | str
store.harvest(model, [TEXT], 'embed', None)                     | TypeError | None
store.harvest(model, None, 'embed', 'folder')                   | TypeError | None
store.harvest(model, [TEXT], 'embed', 'folder', shard=3)        | TypeError | jobs.*got 3
store.harvest(model, [TEXT], 'embed', 'folder', context=128)    | TypeError | context=; use config=HarvestConfig\(context=...\)
store.harvest(model, [TEXT], 'embed', 'folder', 128)            | TypeError | HarvestConfig.*128
store.plan(model, [TEXT], 'embed', pos=-1)                      | TypeError | pos=; use config=HarvestConfig\(pos=...\)
store.HarvestConfig(without=['a'])                              | TypeError | 'a'
store.HarvestConfig(contxt=3)                                   | TypeError | contxt=; close matches: context
store.Settings                                                  | AttributeError | it is now interp.store.HarvestConfig
store.harvest(model, [TEXT], 'embed')                           | TypeError | 'out'
store.statistics(model, TEXT, 'embed', reading='induction')     | TypeError | 'induction'.*lambda
store.statistics(model, TEXT, 'embed', reading=lambda m, c: 3)  | TypeError | Result.*got 3
store.statistics(model, TEXT, 'embed', reading=lambda c: 3)     | TypeError | model, cache.*\(c\).*head_scores
store.statistics(model, TEXT, 'embed', top='x')                 | TypeError | 'x'
store.statistic                                                 | AttributeError | statistics
store.Activations(None)                                         | TypeError | None
store.Activations('no_such_folder')                             | FileNotFoundError | no_such_folder
store.statistics(model, TEXT, 'embed', pos=-1)                  | TypeError | pos=; use harvest.*HarvestConfig\(pos=...\)
directions.probe(TEXT, ([TEXT], [TEXT]))                        | TypeError | models.load
directions.difference_of_means(model, ([TEXT], [TEXT]), 3)      | TypeError | site.*3
directions.prob                                                 | AttributeError | probe
Direction(None)                                                 | TypeError | vectors.*None
Direction({'embed': np.ones(3)})                                | TypeError | at embed.*array
effects.interval('a')                                           | TypeError | 'a'
effects.save('')                                                | ValueError | empty
effects.top('x')                                                | TypeError | 'x'
effects.plot('x')                                               | UnknownNameError | x
effects.save(3)                                                 | TypeError | 3
effects['layer']                                                | TypeError | values
interp.Result.load('x.json')                                    | ValueError | without a suffix; got x.json
interp.detect_head                                              | AttributeError | head_scores
from_interp('harvest')                                          | ImportError | interp.store.harvest
interp.Result.load(3)                                           | TypeError | 3
Direction.load(3)                                               | TypeError | 3
HookPoint(3)                                                    | TypeError | 3
HookPoint('batch batch')                                        | ValueError | batch batch
Mode('x')                                                       | ValueError | full
FactoredMatrix(3, 4)                                            | TypeError | rows, columns.*3
spectral.effective_rnk                                          | AttributeError | effective_rank
plots.attention                                                 | AttributeError | attribution
attribution_graphs.graph                                        | AttributeError | attribution_graph
interp.logits_lens                                              | AttributeError | logit_lens
interp.why_attends                                              | AttributeError | now interp.attention_attribution
interp.minimality                                               | AttributeError | now interp.evaluate_circuit
models.stream                                                   | AttributeError | now models.generate_steps
interp.ActivationPatching                                       | AttributeError | activation_patching
models.HookedTransformer                                        | AttributeError | models.load
models.loads                                                    | AttributeError | load
hooks.Runner                                                    | AttributeError | HookedRunner
edge_attribution(model, pairs, 'eap', steps=5)                   | ValueError | 'eap', which has none; got 5
runner.run_with_hooks(TEXT, hooks={('z', 3): edits.zero()})     | TypeError | '..3..z'; got .'z', 3.
hooks.index_by_axis(None, {'pos': 0}, 'the stream')             | TypeError | axes.*None.*'batch'
hooks.index_by_axis(('pos',), 0, 'the stream')                  | TypeError | where.*got 0
models.causal_mask('a')                                         | TypeError | whole number.*'a'
models.causal_mask(-1)                                          | ValueError | -1
effects.dims                                                    | AttributeError | result.axes
effects.top(3, abs=True)                                        | TypeError | abs=; places are sorted
effects.top(3, signed=True)                                     | TypeError | signed=; use largest=True, or largest=False
effects.min()                                                   | AttributeError | result.top.1, largest=False
effects.argmax()                                                | AttributeError | result.top.1, largest=True
effects.mean('example')                                         | TypeError | result.values.mean
effects.mean(axis='layer')                                      | TypeError | axis=; .*values.mean
effects.select(layer=-1)                                        | ValueError | got -1; counted from the end, this is 3
effects.plot(facets='head')                                     | TypeError | facets=; close matches: facet
effects.plot(figsize=(4, 3))                                    | TypeError | figsize=; .*set_size_inches
effects.plot(limit='a')                                         | TypeError | limit must be a positive number; got 'a'
effects.plot(vmax=2)                                            | TypeError | vmax=; use limit=
effects.to_csv('x.csv')                                         | AttributeError | result.save..x.csv
effects.to_latex()                                              | AttributeError | to_dataframe...to_latex
effects.savefig('x.pdf')                                        | AttributeError | result.plot...save
effects.std()                                                   | AttributeError | result.interval
effects.top(3).to_dataframe()                                   | AttributeError | result.to_dataframe
effects.top(3).heads                                            | AttributeError | entry.where.'head'. for entry in entries
effects.top(3).effects                                          | AttributeError | entry.effect for entry in entries
effects.top(3).note                                             | AttributeError | close matches: notes
effects.save('x.pt')                                            | ValueError | x.pt .*safetensors and no suffix
interp.load_result                                              | AttributeError | Result.load
edits.set(5.0)                                                  | AttributeError | edits.replace
edits.clamp(5.0)                                                | AttributeError | edits.replace
directions.Direction({'embed': torch.ones(3)}).norm()           | AttributeError | direction.name..norm
directions.Direction({'embed': torch.ones(3)})[2]               | UnknownNameError | vector for any point.*'embed'
sae.cfg                                                         | AttributeError | sae.reads
sae.run_with_cache(TEXT)                                        | AttributeError | interp.splice
graph.nodes                                                     | AttributeError | graph.writers
Pairs.load('pairs.json')                                        | AttributeError | Pairs.clean, corrupted, answers.*other programs
pairs.load('pairs.json')                                        | AttributeError | Pairs.clean, corrupted, answers.*other programs
Pairs.read                                                      | AttributeError | Pairs has no attribute 'read'
pairs.answer                                                    | AttributeError | answers
model.n_layers                                                  | AttributeError | model.config.n_layers
model.config.n_layer                                            | AttributeError | n_layers
cache.resid_post                                                | AttributeError | cache.'resid_post', layer
cache[:, -1]                                                    | TypeError | cache.at.pos=-1
cache.stack('z', axis=1)                                        | TypeError | axis=; it takes short
cache.at(layer=2)                                               | UnknownNameError | 'layer': cache
runner.trace(TEXT)                                              | AttributeError | run_with_hooks
runner.run_with_cache(t for t in [TEXT])                        | TypeError | generator .write list
runner.run_with_cache([])                                       | ValueError | at least one text; got 0 texts
runner.run_with_cache([TEXT, ''])                               | ValueError | 2 texts, of which these are empty: .1.
runner.capture(TEXT, 'embed')                                   | TypeError | names= needs its name
runner.run_with_cache(TEXT, names='transformer.h.0')            | UnknownNameError | table
runner.run_with_hooks(TEXT, hooks={'embed': torch.ones(3)})     | TypeError | torch.float32 tensor .3.; interp.edits.replace
runner.run_with_hooks(TEXT, hooks={'embed': edits.zero})        | TypeError | write edits.zero
runner.run_with_hooks(TEXT, hooks={'embed': lambda x, point: point.ctx}) | AttributeError | ctx.*dict of your own
runner.run_with_hooks(TEXT, hooks={'embed': edits.zero(layers=2)}) | UnknownNameError | 'layers': the name of a point
runner.run_with_hooks(TEXT, hooks={'embed': edits.mean(torch.ones(128))}) | UnknownNameError | 'batch'; got a value .128. .edits.replace
runner.run_with_hooks(TEXT, hooks={'embed': edits.mean(cache2, across='pos')}) | EditError | got 2 .use across=.'batch', 'pos'
HookedRunner(transformers_model).capture([[1]], names='z')      | UnknownNameError | models.attach
HookedRunner(transformers_model).run_with_cache(torch.ones(1, 2).long())[1]['pattern', 0] | UnknownNameError | models.attach
edits.mean(head=3)                                              | TypeError | 'reference'; such as edits.mean
edits.mean([TEXT, 'x'])                                         | TypeError | run_with_cache.texts
edits.scale(2, 3)                                               | TypeError | needs the name of its axis
models.generate_text(model, TEXT, max_new_tokens=2, hooks={})          | TypeError | hooks=; .*HookedRunner.model..hooks
models.generate_text(model, TEXT, 8)                                   | TypeError | 8 needs the name.*max_new_tokens=
models.generate_text(model, TEXT, max_new_tokens=8, num_beams=2)       | TypeError | num_beams=; .*temperature
models.TrainingConfig(steps=2, lr=0.1)                          | TypeError | lr=; use learning_rate=
models.train(model, tokens, steps=2)                            | TypeError | TrainingConfig
models.load('notes.json')                                       | ValueError | notes.json must be weights
models.load('pydoc-4l', device_map='auto')                      | TypeError | use device=
Pairs(TEXT, TEXT, 'a', 'b')                                     | TypeError | answers are one argument
activation_patching(model, pairs, 'z', layers='all')            | TypeError | left out for all; got 'all'
activation_patching(model, pairs, 'heads')                      | UnknownNameError | 'heads'; here it is 'z'
edge_attribution(model, pairs, method='EAP-IG')                 | ValueError | did you mean 'eap_ig_inputs'
circuits.top(graph, effects, 20)                                | ValueError | edge_attribution
direct_logit_attribution(model, cache, 'a')                     | TypeError | 'a' needs the name.*right=
direct_logit_attribution(model, cache, tokens='a')              | TypeError | tokens=; use right=
logit_lens(model, cache, k=3)                                   | TypeError | k=; close matches: top_k
attention_attribution(model, cache, layer=1, head=0)            | TypeError | head=.layer, head
plots.patterns(cache)                                           | TypeError | patterns.model, cache
spectral.svd(np.ones((3, 5)))                                   | TypeError | float64 array .3, 5.; torch.as_tensor
spectral.svd(model.blocks[0].attn)                              | TypeError | an Attention
singular_tokens(model, 3)                                       | ValueError | head must be given for 'ov', such as head=0
ov_circuit(model, 3)                                            | TypeError | ov_circuit.model..layer, head
load_sae('x', release='y')                                      | TypeError | release=; load_sae
interp.splice(model, 3)                                         | TypeError | dictionaries must be a Dictionary; got 3
interp.splice(model, {'blocks.0.mlp_out': TEXT})                | TypeError | blocks.0.mlp_out needs a dictionary.*got str
interp.splice(model, {'embed': sae}, point='embed')             | ValueError | point must be None
spliced(sae, model)                                             | TypeError | dictionaries must be a Dictionary; got a Transformer
spliced(model, {2: sae})                                        | TypeError | the point of a dictionary must be a name; got 2
directions.probe(model, [TEXT, 'x'], [1, 0])                    | TypeError | contrast .*single text.*: write \(yes, no\)
directions.probe(model, ([TEXT, 'x'], [1, 0]))                  | ValueError | got labels: pass the texts of each kind
directions.probe(model, [TEXT] * 3, ['x'] * 3)                  | TypeError | pair .*; got a list of 3: write \(yes, no\)
directions.probe(model, [TEXT], ['x'], 'resid_post')            | TypeError | one argument: probe\(model, \(yes, no\), ...\)
directions.probe(model, yes=[TEXT], no=['x'])                   | TypeError | yes=; .*: probe\(model, \(yes, no\), ...\)
directions.erasure(model, [TEXT], no=['x'])                     | TypeError | no=; .*: erasure\(model, \(yes, no\), ...\)
directions.difference_of_means(model, 3, labels=[1, 0])         | TypeError | labels=; use .*Contrast\(store, labels=...\)
directions.sparse_probes(model, sae, [TEXT], ['x'], k=[1])      | TypeError | sparse_probes\(model, dictionary, \(yes, no\), ...\)
directions.Contrast([TEXT])                                     | ValueError | no= .* or, for one store, labels= must
directions.probe(model, ([TEXT], ['x']), pos=None)              | TypeError | pos=; use probe\(model, Contrast\(yes, no, pos=...\), ...\)
directions.erasure(model, ([TEXT], ['x']), batch=3)             | TypeError | batch=; use erasure\(model, Contrast\(yes, no, batch=...\), ...\)
directions.probe(model, ([TEXT], ['x']), over='position')       | ValueError | over must be one of None, pos; got 'position'
directions.Contrast([TEXT], ['x'], batch=0)                     | ValueError | batch must be .*got 0
directions.Contrast([TEXT], ['x'], groups='pair')                | TypeError | groups must be a list .*, or 'pairs'; got 'pair'
directions.Contrast([TEXT], label=[1])                          | TypeError | label=; close matches: labels
directions.probe(eye, (eye, eye))                                 | TypeError | model must be .*Module; got a .*tensor
directions.probe(model, [TEXT])                                 | TypeError | pair .*; got a list of 1: write \(yes, no\)
activation_patching()                                           | TypeError | model, pairs, site='resid_pre', over=None, \*
runner.run_with_cache(TEXT, pos=500)                            | TypeError | pos=.500. for one position
directions.probe(model, ([TEXT], ['x']), layer=2)               | TypeError | layer=; name the layer in site=
directions.difference_of_means(model, directions.Contrast([TEXT], ['x'], pos='first')) | UnknownNameError | 'first': they have no spans
directions.steering_curve(model, Direction({'blocks.2.resid_post': torch.ones(128)}), [TEXT], 1.0, log_prob('a')) | TypeError | strengths must be a list of numbers; got 1.0
store.Activations('notes.json')                                 | FileNotFoundError | no store at .*notes.json
repeated_tokens(9, 3, seed='a') | TypeError | seed must be a whole number .*'a'
repeated_tokens(9, 3, seed=2**64) | ValueError | seed must be .*18446744073709551616
logit_lens(model, cache, lens=5) | TypeError | lens must be a lens; got 5; tuned_lens
logit_lens(model, cache, targets=[1]) | TypeError | targets must be .*got \[1\]
interp.full_circuits(model, 0, None) | TypeError | head must be a whole number .*None
interp.full_circuits(model, 9, 0) | ValueError | layer must be .*to 3; got 9
cache.stack(None) | TypeError | 'resid_post'; got None
directions.steering_curve(model, None, [TEXT], [1.0], log_prob('a')) | TypeError | vectors must be a Direction; got None
features.stability(sae, None) | TypeError | other must be a Dictionary; got None
features.purity(model, [TEXT], 'blocks.0.mlp.post', pos=[]) | ValueError | pos must select a token of at least one text; got \[\]
sae.decode(sae.encode(cache['resid_post', 2]), 5) | TypeError | x must be a tensor.*got 5
Circuit(graph, ['m0->logits'], 'a') | TypeError | scores must be .*'a'
Circuit(graph, ['m0->logits'], found_on=5) | TypeError | found_on .*got 5; pairs.digests
directions.probe(model, ([TEXT], ['x']), folds='3') | TypeError | folds must be a whole number .*'3'
directions.probe(model, ([TEXT], ['x']), folds=1) | ValueError | folds must be .*at least 2; got 1
directions.probe(model, ([TEXT], ['x']), draws=None) | TypeError | draws must be a whole number .*None
directions.probe(model, ([TEXT], ['x']), C='3') | TypeError | C must be a number above 0; got '3'
directions.sparse_probes(model, sae, ([TEXT], ['x']), k=5) | TypeError | k must be a list .*got 5; for example
directions.Contrast(None, ['x']) | TypeError | yes= must be a list of texts.*None
directions.Contrast([TEXT], 5) | TypeError | no= must be a list of texts.*5
positional_scores(model, n_pos='3') | TypeError | n_pos must be a whole number .*'3'
singular_tokens(model, 1, 0, top='3') | TypeError | top must be a whole number .*'3'
attribution_graph(model, TEXT, transcoders, desired_prob='3') | TypeError | desired_prob must be a number from 0 to 1; got '3'
attribution_graph(model, TEXT, transcoders, desired_prob=2.5) | ValueError | desired_prob must be a number from 0 to 1; got 2.5
attribution_graph(model, TEXT, transcoders, max_features='3') | TypeError | max_features must be a whole number .*'3'
attribution_graph(model, TEXT, transcoders, max_bytes='3') | TypeError | max_bytes must be a number of bytes; got '3'
interp.edge_patching(model, pairs, max_bytes='3') | TypeError | max_bytes must be a number of bytes; got '3'
jacobian_lens(model, [TEXT], skip=0, max_bytes='3') | TypeError | max_bytes must be a number of bytes; got '3'
tuned_lens(model, [TEXT], learning_rate='3') | TypeError | learning_rate must be a number.*'3'
activation_patching(model, pairs, layers=2.5) | TypeError | layers must be a number or a list.*2.5
svd_targets(model, cache, layers=2.5) | TypeError | layers must be a layer or a list.*2.5
edge_attribution(model, pairs, direction=None) | TypeError | direction must be one of denoising, noising; got None
node_effects(model, pairs, direction=None) | TypeError | direction must be one of denoising, noising; got None
run_circuit(model, pairs, ['m0->logits'], direction=None) | TypeError | direction must be one of denoising, noising; got None
load_sae('pydoc-4l/resid_post', 3) | TypeError | format must be .*got 3
load_sae('pydoc-4l/resid_post', 'sae_len') | UnknownNameError | 'sae_len'; close matches: sae_lens
load_sae('pydoc-4l/resid_post', k=3) | ValueError | k must be None for pydoc-4l/resid_post
store.HarvestConfig(column=3) | TypeError | column must be .*got 3
store.HarvestConfig(batch=None) | TypeError | batch must be a whole number .*None
store.statistics(model, TEXT, 'embed', seed='3') | TypeError | seed must be a whole number .*'3'
interp.splice(model, sae, point=[]) | TypeError | point must be the name of a point; got \[\]
evaluate_sae(model, sae, [TEXT], reads=[]) | TypeError | reads must be a name.*got \[\]
models.load('pydoc-4l', ignore=5) | TypeError | ignore must be a list of keys; got 5
interp.kl_divergence(logits, attention_mask=[1])(logits) | TypeError | attention_mask must be a tensor .*\[1\]
models.next_token_loss(logits, tokens, [1]) | TypeError | attention_mask must be a tensor .*\[1\]
interp.max_activating(model, [TEXT], 'blocks.0.mlp.post', neuron=[]) | TypeError | neuron must be a whole number; got \[\]
runner.run_with_cache(5) | TypeError | texts must be .*got 5
directions.probe(model, ([TEXT], ['x']), kind=3) | TypeError | kind must be one of logistic, linear; got 3
effects.top('3') | TypeError | k must be a whole number .*'3'
directions.probe(model, ([TEXT], ['x']), groups=[0, 1])          | TypeError | groups=; use probe\(model, Contrast\(yes, no, groups=...\), ...\)
store.harvest(model, [TEXT], 'embed', 'folder', batch_size=8)   | TypeError | batch_size=; use config=HarvestConfig\(batch=...\)
store.plan(model, [TEXT], 'embed', context_size=8)              | TypeError | context_size=; use config=HarvestConfig\(context=...\)
store.HarvestConfig(ctx_len=8)                                  | TypeError | ctx_len=; use context=
effects.at(layer=2)                                             | AttributeError | result.select\(layer=2\)
runner.run_with_cache_with_saes(TEXT)                           | AttributeError | with interp.splice\(model, sae\)
from_interp('SteeringVector')                                   | ImportError | interp.directions.Direction
from_interp('LinearProbe')                                      | ImportError | interp.directions.probe
from_interp('train_probe')                                      | ImportError | interp.directions.probe
from_interp('ActivationStore')                                  | ImportError | interp.store.harvest
from_interp('SparseAutoencoder')                                | ImportError | interp.features.Dictionary\(W_enc, .*load_sae
from_interp('sae_from_weights')                                 | ImportError | interp.features.Dictionary\(W_enc
from_interp('SAE')                                              | ImportError | load_sae\(path\), or interp.features.Dictionary\(W_enc
from_interp('add_vector')                                       | ImportError | interp.edits.add\(vector
model.to_tokens([TEXT, 'x'])[1]                                 | TypeError | text.rows\(slice\(1, 2\)\), text.tokens
len(model.to_tokens([TEXT, 'x']))                               | TypeError | the length of a Text is ambiguous: use len\(text.tokens\)
features.Dictionary(eye, eye, eye[0], eye[0], nn.ReLU(), k=2)   | TypeError | k=; use activation=TopK\(k\)
features.Dictionary(eye[:2].T, eye[:2].T, eye[0, :2], eye[0], nn.ReLU()) | ValueError | W_dec must be .*\[2, 3\]; got \[3, 2\], which is transposed: pass W_dec.T
features.Dictionary(eye[:2], eye[:2], eye[0, :2], eye[0], nn.ReLU()) | ValueError | W_enc must be .*\[3, 2\]; got \[2, 3\], which is transposed: pass W_enc.T
features.Dictionary(eye[:2].T, eye[:2], eye[0], eye[0, :2], nn.ReLU()) | ValueError | W_enc must be .*\[2, 3\]; got \[3, 2\], which is transposed
load_sae('gemma-scope', 'layer_20/width_16k')                   | UnknownNameError | one text: load_sae\('gemma-scope/layer_20/width_16k'\)
load_sae('res-jb', sae_id='blocks.8')                           | TypeError | load_sae\('release/sae_id'\) takes
Direction({'blocks.1.resid_post': torch.ones(2)})['mlp_out', 1] | UnknownNameError | 'mlp_out', 1.*known names are 'blocks.1.resid_post'
Direction({'blocks.1.resid_post': torch.ones(2)})[-3]           | UnknownNameError | in layer -3; its layers are 1
Direction({'blocks.1.resid_post': torch.ones(2)})[None]         | TypeError | a layer, the name of a point, or a pair .*got None
model.tokenizer.decode('3')                                     | TypeError | whole numbers; got .*'3'
models.chat(model, [{'role': 'user', 'content': 'hi'}], template=5) | TypeError | template must be a text.*got 5
alignment.pca(None, 2)                                          | TypeError | values must be a tensor.*None
alignment.neurons('3')                                          | TypeError | size must be a whole number .*'3'
plots.patterns(model, cache, scores=5)                          | TypeError | scores must be a Result; got 5; .*head_scores
plots.effects(5)                                                | TypeError | result must be a Result; got 5; an analysis
plots.curves([1.0])                                             | TypeError | series must be a mapping.*\[1.0\]; for example
Direction({}, None)                                             | TypeError | offsets must be .*None
Direction({}).scores(None)                                      | TypeError | values must be a cache.*None
models.train_test_split(tokens[0], '0.5')                       | TypeError | fraction must be a number.*'0.5'
spectral.randomized_svd(eye, 1, seed='a')                       | TypeError | seed must be a whole number .*'a'
svd_targets(model, cache, '3')                                  | TypeError | layers must be a layer or a list.*'3'
Mode(5)                                                         | TypeError | mode must be one of .*got 5
compare_models(model, model)                                    | TypeError | texts must be one or several texts; got None
compare_models(model, model, [TEXT], seed=None)                 | TypeError | seed must be a whole number .*None
"""
LINES = [[part.strip() for part in line.split(" | ")] for line in MISTAKES.strip().splitlines()]
TEXT = "def f(x): return x"
# Words in errors of Python itself. No mistake may end in such an error.
OF_PYTHON = re.compile(
    r"^'\w+' object |NoneType' object|not subscriptable|is not iterable|unsupported operand|has no len|"
    r"unexpected keyword|has no attribute 'shape|takes \d+ positional|os\.PathLike object, not|indices must be|tensor\(|array\("
)


def spliced(model, dictionaries):
    with interp.splice(model, dictionaries):
        raise AssertionError("not reached")


def named_in_splice(model, dictionary, name):
    with interp.splice(model, dictionary) as runner:
        runner.capture(TEXT, names=name)


@pytest.fixture(scope="module")
def given():
    """The names that the calls of the table use."""
    model = pydoc()
    runner = HookedRunner(model)
    logits, cache = runner.run_with_cache(TEXT)
    pairs = interp.Pairs("def __ini", "def __nam", ("t", "e"))
    made = {
        "model": model,
        "runner": runner,
        "logits": logits,
        "cache": cache,
        "cache2": runner.run_with_cache([TEXT, TEXT + " + 1"])[1],
        "tokens": model.to_tokens(TEXT).tokens,
        "pairs": pairs,
        "graph": interp.graph.Graph(model),
        "effects": interp.activation_patching(model, pairs, "resid_post", over="layer"),
        "sae": interp.load_sae("pydoc-4l/resid_post"),
        "transcoders": interp.load_transcoders("pydoc-4l/transcoders"),
        "transformers_model": tiny.model("GPT2LMHeadModel"),
        "eye": torch.eye(3),
        "spliced": spliced,
        "named_in_splice": named_in_splice,
        "from_interp": lambda name: exec(f"from interp import {name}"),
    }
    names = {name: getattr(interp, name) for name in interp.__all__}
    others = [interp.alignment, directions, hooks, interp, models, nn, np, store, torch]
    named = {module.__name__.rpartition(".")[2]: module for module in others}
    kinds = {kind.__name__: kind for kind in (Direction, HookedRunner, HookPoint, Mode)}
    return {**names, **named, **kinds, **made, "np": np, "TEXT": TEXT}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("call", "error", "match"), LINES, ids=[line[0] for line in LINES])
def test_a_mistake_is_an_error_that_helps(call, error, match, given, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.json").write_text("{}")
    kind = getattr(hooks, error, None) or getattr(models, error, None) or getattr(builtins, error)
    with pytest.raises(kind, match=match) as caught:
        eval(call, dict(given))
    message = str(caught.value)
    assert not OF_PYTHON.search(message)
    assert len(message) < 900
    assert type(caught.value) is not KeyError
    assert isinstance(caught.value, HookError) or type(caught.value) is kind


def test_a_result_has_the_shape_of_its_values(given):
    effects = given["effects"]
    assert effects.shape == (given["model"].config.n_layers, 1)


def test_a_direction_times_a_number_scales_vectors_and_offsets():
    vector = torch.tensor([3.0, -4.0, 5.0])
    direction = Direction({"embed": vector}, {"embed": -1.5}, {"by": "hand"})
    value = np.array([2.0, 7.0, 1.0])
    for scaled in (direction * 2, 2.0 * direction):
        assert scaled["embed"].tolist() == [6.0, -8.0, 10.0]
        # The score of a value is scaled too.
        scores = scaled.scores({"embed": torch.tensor(value).float()})["embed"]
        assert float(scores) == 2 * (value @ vector.numpy() - 1.5)
        assert scaled.about == {"by": "hand"}
    with pytest.raises(TypeError):
        direction * "2"


def test_private_names_of_objects_have_no_hints(given):
    """Notebooks and `copy` look up private names in every object."""
    for thing in (given["effects"], given["sae"], given["pairs"], given["graph"]):
        with pytest.raises(AttributeError) as caught:
            getattr(thing, "_repr_nothing" + "_")
        assert "here it is" not in str(caught.value)
        assert type(copy.copy(thing)) is type(thing)


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is here")
@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    "call",
    [
        "models.load('pydoc-4l', device='cuda')",
        "cache.to('cuda')",
        "runner.run_with_cache(TEXT, device='cuda')",
        "models.load('pydoc-4l', device='cuda:1')",
    ],
)
def test_a_device_that_is_not_here_is_one_line(call, given):
    with pytest.raises(ValueError, match="'cuda.*is_available") as caught:
        eval(call, dict(given))
    assert "\n" not in str(caught.value)


def test_a_detach_takes_nothing_from_a_plain_model(given):
    model = pydoc()
    models.detach(model)
    torch.testing.assert_close(model(given["tokens"]), given["logits"], rtol=1e-4, atol=1e-4)


def test_the_guide_of_errors_lists_every_kind():
    """The table of the guide contains each class of errors of `hooks` and `models`, with its base
    classes of Python.
    """
    guide = (ROOT / "examples" / "guides" / "errors.md").read_text(encoding="utf-8")
    rows = {row[1]: row[0] for row in re.finditer(r"^\| `(\w+Error)`.*$", guide, re.MULTILINE)}
    kinds = [getattr(hooks, name) for name in hooks.__all__ if name.endswith("Error")]
    for kind in [*kinds, models.AttachError, models.VerificationError]:
        assert kind.__name__ in rows or kind is HookError
        if isinstance(kind, type) and kind is not HookError:
            own = [base.__name__ for base in kind.__mro__ if base.__module__ == "builtins"][:1]
            plain = own[0] in ("Exception", "AssertionError", "RuntimeError")
            assert plain or f"`{own[0]}`" in rows[kind.__name__], kind


@pytest.mark.parametrize(
    "call",
    [
        "models.next_token_loss(model(tokens), tokens)",
        "runner.capture(tokens, names='blocks.2.resid_pre')",
        "model.to_tokens(TEXT, bos=False)",
        "Circuit(graph, ['m0->logits'])",
        "logit_diff(1, 2)",
    ],
)
def test_the_calls_that_the_guide_of_errors_names_run(call, given):
    assert eval(call, dict(given)) is not None
