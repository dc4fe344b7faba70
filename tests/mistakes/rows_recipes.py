"""Mistakes in recipes: policies, scalers, optimizers, schedules and the recipe itself. Rows of `table`."""

from __future__ import annotations

from typing import Final

from tests.mistakes.table import CORE, EVERYWHERE, JAX, TENSORFLOW, TORCH, Row, every

_ADAM: Final = r"adam has the arguments learning_rate, betas, eps, weight_decay"

ROWS: Final = [
    *every(
        "PolicyError",
        CORE,
        [
            # other letter cases, blanks and hyphens
            ("Policy('FP16')", r"Received: 'FP16'\. Did you mean 'fp16'\?"),
            ("Policy('Mixed_Float16')", r"Did you mean 'mixed_float16'\?"),
            ("Policy('mixed-float16')", r"Did you mean 'mixed_float16'\?"),
            ("Policy('mixed float16')", r"Did you mean 'mixed_float16'\?"),
            ("Policy(' bf16 ')", r"Did you mean 'bf16'\?"),
            ("Policy('MIXED BFLOAT16')", r"Did you mean 'mixed_bfloat16'\?"),
            ("Policy('BF16_Mixed')", r"Did you mean 'bf16-mixed'\?"),
            ("Policy('o2')", r"Did you mean 'O2'\?"),
            ("Policy('NO')", r"Did you mean 'no'\?"),
            ("Policy('Float16')", r"Did you mean 'float16'.*every.*16 bits.*'mixed_float16'"),
            # wrong names
            ("Policy('mixed')", r"Received: 'mixed'\. Did you mean .*'mixed_float16'"),
            ("Policy('fp16-mixed')", r"Did you mean .*'16-mixed'"),
            ("Policy('half')", r"Did you mean 'mixed_float16'.*'float16'"),
            ("Policy('amp')", r"Did you mean 'mixed_float16'.*'mixed_bfloat16'"),
            ("Policy('bfloat')", r"Did you mean .*'bfloat16'"),
            ("Policy('tf32')", r"float32_matmul='high'"),
            ("Policy('fp8')", r"policy must be one of.*Received: 'fp8'.*8 bits"),
            ("Policy('')", r"policy must be one of.*Received: ''"),
            # what is no name
            ("Policy(16)", r"policy must be a string.*Received: 16\. Did you mean '16-mixed'"),
            ("Policy(np.float16)", r"policy must be a string.*Received: .*float16.*dtype.*'mixed_float16'.*compute="),
            ("Policy(None, compute='int8')", r"compute must be one of.*Received: compute='int8'"),
            ("Policy(compute='FP16')", r"Received: compute='FP16'\. Did you mean 'fp16'\?"),
            ("Policy(compute=np.int32)", r"compute must be one of .*Received: compute=.*int32"),
            ("Policy(compute=16)", r"compute must be one of.*Received: compute=16"),
            ("Policy({'compute': 'float16'})", r"policy must be a string.*Received: \{.*Policy\(\*\*"),
            ("Policy('fp16', compute='bf16')", r"'fp16' already settles compute; give either"),
            ("Policy('fp16', mode='autocasts')", r"mode must be one of.*Did you mean 'autocast'"),
            ("Policy(compute='float32', param='float16')", r"cannot hold the master weights"),
            # jmp
            ("Policy('c=int8')", r"jmp policy.*Received: 'c=int8'"),
            ("Policy('computee=float16')", r"jmp policy.*Did you mean 'compute'"),
            ("Policy('c=float16,c=float32')", r"jmp policy.*each at most once.*Received: 'c=float32'"),
            ("Policy('c=Float16')", r"jmp policy.*Did you mean 'float16'\?"),
            ("Policy('params=float16,compute=float32')", r"cannot hold the master weights"),
            # overrides
            ("Policy('fp16', overrides=['head'])", r"overrides must map.*Received: \['head'\]"),
            (
                "Policy('fp16', overrides={'encoder.head': 'float32'})",
                r"separated by '/'.*Received: 'encoder\.head'.*"
                r"Did you mean 'encoder/head'",
            ),
            ("Policy('fp16', overrides={'head': 'fp23'})", r"overrides\['head'\].*Did you mean 'fp32'"),
            ("Policy('fp16', op_rules={'dot': 'fp16'})", r"op_rules\['dot'\] must be one of"),
        ],
    ),
    *every(
        "ArgumentError",
        CORE,
        [
            ("Policy(dtype='float16')", r"Policy has the arguments.*Received: dtype=.*Did you mean 'compute'"),
            ("Policy('fp16', override={'head': 'float32'})", r"Received: override=.*Did you mean 'overrides'"),
            # optimizers: other libraries' names
            (
                "polyamp.adamw(lr=1e-3)",
                r"adamw has the arguments learning_rate.*Received: lr=\. Did you mean 'learning_rate'",
            ),
            ("polyamp.adam(beta_1=0.9, beta_2=0.99)", rf"{_ADAM}.*Received: beta_1=.*betas=\(beta_1, beta_2\)"),
            ("polyamp.adam(b1=0.9)", rf"{_ADAM}.*Received: b1=.*betas=\(b1, b2\)"),
            ("polyamp.adam(epsilon=1e-7)", rf"{_ADAM}.*Received: epsilon=\. Did you mean 'eps'"),
            ("polyamp.sgd(0.1, dampening=0.5)", r"Received: dampening=.*framework's own optimizer"),
            ("polyamp.adamw(weight_decay_rate=0.1)", r"Received: weight_decay_rate=\. Did you mean 'weight_decay'"),
            ("polyamp.adamw(wd=0.1)", r"Received: wd=\. Did you mean 'weight_decay'"),
            ("polyamp.rmsprop(rho=0.9)", r"Received: rho=\. Did you mean 'alpha'"),
            ("polyamp.rmsprop(decay=0.9)", r"Received: decay=\. Did you mean 'alpha'"),
            ("polyamp.sgd(params=[])", r"Received: params=.*polyamp\.init"),
            ("polyamp.adamw(fused=True)", r"Received: fused=.*polyamp chooses"),
            ("polyamp.adamw(clipnorm=1.0)", r"Received: clipnorm=.*Recipe\(clip_norm="),
            ("polyamp.sgd(1.0, learning_rate=1.0)", r"learning_rate.*by name and position"),
            ("polyamp.lion(1e-4, (0.9, 0.99), 0.0, (), 1e-8)", r"lion has the arguments.*Received: 5 positional"),
            # recipes: other libraries' names
            ("Recipe('mixed_float16')", r"Recipe.*by name.*Received: 1 positional.*Recipe\(policy='mixed_float16'\)"),
            ("Recipe(lr=1e-3)", r"Received: lr=.*optimizer=polyamp\.adamw\("),
            ("Recipe(precision='16-mixed')", r"Received: precision=\. Did you mean 'policy'"),
            ("Recipe(mixed_precision='fp16')", r"Received: mixed_precision=\. Did you mean 'policy'"),
            ("Recipe(dtype='bfloat16')", r"Received: dtype=\. Did you mean 'policy'"),
            ("Recipe(optim=polyamp.adamw())", r"Received: optim=\. Did you mean 'optimizer'"),
            ("Recipe(tx=polyamp.adamw())", r"Received: tx=\. Did you mean 'optimizer'"),
            ("Recipe(grad_clip=1.0)", r"Received: grad_clip=\. Did you mean 'clip_norm'"),
            ("Recipe(max_grad_norm=1.0)", r"Received: max_grad_norm=\. Did you mean 'clip_norm'"),
            ("Recipe(gradient_clip_val=1.0)", r"Received: gradient_clip_val=\. Did you mean 'clip_norm'"),
            (
                "Recipe(gradient_accumulation_steps=4)",
                r"Received: gradient_accumulation_steps=\. Did you mean 'accumul",
            ),
            ("Recipe(loss_scaler='off')", r"Received: loss_scaler=\. Did you mean 'scaler'"),
            ("Recipe(schedule=schedules.constant(1.0))", r"Received: schedule=.*learning_rate="),
            ("Recipe(epochs=3)", r"Recipe has the arguments policy, scaler, optimizer, clip_norm.*Received: epochs="),
            # scalers
            ("LossScaler(2.0**16)", r"LossScaler.*by name.*Received: 1 positional.*init_scale="),
            ("LossScaler('dynamic')", r"LossScaler.*by name.*Received: 1 positional.*kind='dynamic'"),
            ("LossScaler(initial_scale=1024.0)", r"Received: initial_scale=\. Did you mean 'init_scale'"),
            ("LossScaler(scale=1024.0)", r"Received: scale=\. Did you mean 'init_scale'"),
            ("LossScaler(enabled=False)", r"Received: enabled=.*LossScaler\.off\(\)"),
            (
                "LossScaler(dynamic_growth_steps=100)",
                r"Received: dynamic_growth_steps=\. Did you mean 'growth_interval'",
            ),
            ("LossScaler(period=100)", r"Received: period=\. Did you mean 'growth_interval'"),
            ("LossScaler(min_loss_scale=1.0)", r"Received: min_loss_scale=\. Did you mean 'min_scale'"),
            # schedules
            ("schedules.cosine(1e-3)", r"cosine has the arguments peak, steps, end.*Missing: steps"),
            ("schedules.cosine(1e-3, T_max=100)", r"Received: T_max=\. Did you mean 'steps'"),
            ("schedules.cosine(1e-3, decay_steps=100)", r"Received: decay_steps=\. Did you mean 'steps'"),
            (
                "schedules.warmup_cosine(1e-3, warmup=10, total=100)",
                r"Received: .*warmup=.*'warmup_steps'.*'total_steps'",
            ),
            (
                "schedules.step(0.1, step_size=30, gamma=0.1)",
                r"Received: step_size=, gamma=\. Did you mean 'every' and 'factor'",
            ),
        ],
    ),
    *every(
        "RecipeError",
        CORE,
        [
            # optimizers
            (
                "polyamp.adamw(-1e-3)",
                r"learning_rate must be a finite number of at least 0.*Received: learning_rate=-0\.001",
            ),
            ("polyamp.adamw('1e-3')", r"learning_rate must be.*Received: learning_rate='1e-3'"),
            ("polyamp.adamw(True)", r"learning_rate must be.*Received: learning_rate=True"),
            (
                "polyamp.adamw((p for p in [1]), 1e-3)",
                r"learning_rate must be.*Received: learning_rate=.*generator.*"
                r"parameters.*polyamp\.init",
            ),
            (
                "polyamp.adamw(lambda count: 1e-3)",
                r"learning_rate must be.*Received: learning_rate=.*polyamp\.schedules",
            ),
            ("polyamp.adamw(schedules.cosine)", r"learning_rate must be.*Received: .*class cosine: call"),
            (
                "polyamp.adamw(np.float32(1e-3))",
                r"Received: learning_rate=np\.float32.*plain data: write value\.item\(\)",
            ),
            ("Recipe(clip_norm=np.float32(1.0))", r"Received: clip_norm=np\.float32.*value\.item\(\)"),
            ("Recipe(accumulate_steps=np.int64(2))", r"Received: accumulate_steps=np\.int64.*value\.item\(\)"),
            ("schedules.cosine(1e-3, np.int64(20))", r"Received: steps=np\.int64.*value\.item\(\)"),
            ("polyamp.adam(betas=0.9)", r"betas must be a pair of numbers.*Received: betas=0\.9"),
            ("polyamp.adam(betas=(0.9, 1.5))", r"betas must be .*below 1.*Received: betas="),
            ("polyamp.adam(eps='1e-8')", r"eps must be.*Received: eps='1e-8'"),
            ("polyamp.sgd(0.1, nesterov=True)", r"nesterov=True needs a momentum above 0"),
            ("polyamp.sgd(0.1, momentum=1.0)", r"momentum must be .*below 1"),
            ("Recipe(optimizer=polyamp.adamw)", r"optimizer.*Received: the class adamw.*polyamp\.adamw\("),
            ("Recipe(optimizer='adamw')", r"optimizer must be.*Received: optimizer='adamw'.*polyamp\.adamw\("),
            ("Recipe(optimizer='AdamW')", r"optimizer must be.*Received: optimizer='AdamW'.*polyamp\.adamw\("),
            ("Recipe(optimizer={'type': 'adamw'})", r"optimizer must be.*Received: .*polyamp\.adamw\("),
            ("Recipe(optimizer=None)", r"optimizer must be.*Received: optimizer=None"),
            ("Recipe(optimizer=1e-3)", r"optimizer must be.*Received: optimizer=0\.001.*adamw\("),
            ("Recipe(optimizer=[polyamp.adamw()])", r"optimizer must be.*Received: .*list"),
            ("Recipe(optimizer=lambda params: None)", r"optimizer must be.*Received: a function"),
            # recipes
            ("Recipe(clip_norm=True)", r"clip_norm must be None or a finite number above 0\. Received: clip_norm=True"),
            ("Recipe(clip_norm=-1)", r"clip_norm must be None or.*Received: clip_norm=-1"),
            ("Recipe(clip_norm='1.0')", r"clip_norm must be None or.*Received: clip_norm='1\.0'"),
            ("Recipe(clip_norm=0)", r"clip_norm must be None or.*Received: clip_norm=0.*None"),
            (
                "Recipe(accumulate_steps=0)",
                r"accumulate_steps must be an integer of at least 1\. Received: accumulate_s",
            ),
            ("Recipe(accumulate_steps=2.0)", r"accumulate_steps must be an integer.*Received: accumulate_steps=2\.0"),
            ("Recipe(accumulate_steps='2')", r"accumulate_steps must be an integer.*Received: accumulate_steps='2'"),
            ("Recipe(policy=None)", r"policy must be.*Received: policy=None.*'float32'"),
            ("Recipe(policy=Policy)", r"policy must be.*Received: the class Policy.*Policy\("),
            ("Recipe(policy=16)", r"policy must be.*Received: policy=16.*'16-mixed'"),
            ("Recipe(policy=np.float16)", r"policy must be.*Received: .*float16.*'mixed_float16'"),
            ("Recipe(scaler=True)", r"scaler must be.*Received: scaler=True.*'dynamic'"),
            ("Recipe(scaler=1024.0)", r"scaler must be.*Received: scaler=1024\.0.*LossScaler\.static\(1024\.0\)"),
            ("Recipe(scaler=LossScaler)", r"scaler must be.*Received: the class LossScaler.*LossScaler\(\)"),
            ("Recipe(policy='float16', scaler='dynamic')", r"float32 master weights.*mixed_float16"),
            # schedules
            ("schedules.warmup_cosine(1e-3, 1000, 100)", r"total_steps must exceed warmup_steps=1000.*swapped"),
            (
                "schedules.warmup_cosine(100, 1000, 1e-3)",
                r"total_steps must be an integer.*Received: total_steps=0\.001.*peak",
            ),
            (
                "schedules.cosine(1000, 1e-3)",
                r"steps must be an integer of at least 1\. Received: steps=0\.001.*swapped",
            ),
            (
                "schedules.linear_warmup(1000, 0.1)",
                r"steps must be an integer of at least 1\. Received: steps=0\.1.*swapped",
            ),
            ("schedules.cosine(1e-3, 100.0)", r"steps must be an integer of at least 1\. Received: steps=100\.0"),
            ("schedules.cosine(1e-3, 0)", r"steps must be an integer of at least 1\. Received: steps=0"),
            ("schedules.step(30, 0.1)", r"every must be an integer.*Received: every=0\.1.*swapped"),
            ("schedules.piecewise([1.0, 0.1], [10, 20])", r"one more value than boundaries"),
            ("schedules.piecewise([10, 20], [1.0, 0.5, 0.1])", r"boundaries must be an integer.*Received: .*1\.0"),
        ],
    ),
    *every(
        "LossScaleError",
        CORE,
        [
            (
                "LossScaler(init_scale='dynamic')",
                r"init_scale must be a number\. Received: init_scale='dynamic'.*LossScaler\(\)",
            ),
            ("LossScaler(init_scale=0)", r"init_scale must be a positive.*Received: init_scale=0"),
            ("LossScaler(init_scale=float('inf'))", r"init_scale must be a positive"),
            (
                "LossScaler(growth_interval=2000.0)",
                r"growth_interval must be an integer.*Received: growth_interval=2000\.0",
            ),
            ("LossScaler(growth_factor=0.5)", r"growth_factor must be at least 1"),
            ("LossScaler(backoff_factor=2.0)", r"backoff_factor must be at most 1"),
            ("LossScaler(kind='none')", r"kind must be 'dynamic', 'static' or 'off'\. Received: kind='none'"),
            ("LossScaler.static('dynamic')", r"init_scale must be a number.*Received: init_scale='dynamic'"),
            ("LossScaler.like('pytorch')", r"like\(\) knows torch.*Received: 'pytorch'\. Did you mean 'torch'"),
            ("LossScaler.like('Torch')", r"Did you mean 'torch'"),
            (
                "Recipe(scaler='dynamc')",
                r"scaler must be one of dynamic, off.*Received: 'dynamc'\. Did you mean 'dynamic'",
            ),
            ("Recipe(scaler='none')", r"scaler.*Received: 'none'.*'off'"),
            ("LossScaler().init('reference', like=np.ones(2))", r"either a backend's name, or like="),
        ],
    ),
    # objects of frameworks
    Row("Recipe(optimizer=torch.optim.AdamW)", "RecipeError", r"Received: the class .*AdamW.*polyamp\.adamw\(", TORCH),
    Row(
        "Recipe(optimizer=keras.optimizers.Adam)",
        "RecipeError",
        r"Received: the class .*Adam.*polyamp\.adam",
        TENSORFLOW,
    ),
    Row("Recipe(optimizer=optax.adam)", "RecipeError", r"Received: a function \(adam\)\. Call it", JAX),
    Row("Recipe(optimizer=model.parameters())", "RecipeError", r"optimizer must be.*Received: a generator", TORCH),
    Row(
        "Recipe(scaler=torch.amp.GradScaler('cpu', enabled=False))", "RecipeError", r"scaler must be.*GradScaler", TORCH
    ),
    Row("Recipe(policy=torch.autocast('cpu'))", "RecipeError", r"policy must be.*Received: .*autocast", TORCH),
    Row("Recipe(policy=torch.float16)", "RecipeError", r"policy must be.*Received: .*float16.*'mixed_float16'", TORCH),
    Row("Policy(torch.float16)", "PolicyError", r"Received: torch\.float16.*'mixed_float16'", TORCH),
    Row("Policy(compute=torch.int8)", "PolicyError", r"compute must be one of.*Received: compute=torch\.int8", TORCH),
    Row("Policy(tf.float16)", "PolicyError", r"Received: .*float16.*'mixed_float16'", TENSORFLOW),
    Row(
        "Recipe(policy=keras.DTypePolicy('mixed_float16'))",
        "RecipeError",
        r"policy must be.*Received: .*DTypePolicy.*policy\.name",
        TENSORFLOW,
    ),
    Row("Recipe(optimizer=optax.sgd(0.1).init(model[1]))", "RecipeError", r"optimizer must be.*Received: a tuple", JAX),
    Row("Policy(jnp.float16)", "PolicyError", r"Received: .*float16.*'mixed_float16'", JAX),
    *every(
        "UnsupportedError",
        TORCH,
        [
            (
                "polyamp.init(model, Recipe(optimizer=torch.optim.SGD(nn.Linear(3, 2).parameters(), 0.1)))",
                r"optimizer must hold exactly the model's trainable parameters.*Build it from",
            ),
            (
                "polyamp.init(model, Recipe(optimizer=torch.optim.SGD([model.weight], 0.1)))",
                r"optimizer must hold exactly the model's trainable parameters",
            ),
            ("polyamp.init(model, Recipe(optimizer=torch.optim.LBFGS(model.parameters())))", r"LBFGS"),
            (
                "polyamp.init(model, Recipe(optimizer=object()))",
                r"optimizer must be.*torch\.optim.*Received: builtins\.obj",
            ),
            (
                "o = torch.optim.SGD(model.parameters(), 0.1)\ns = torch.optim.lr_scheduler.StepLR(o, 1)\n"
                "polyamp.init(model, Recipe(optimizer=s))",
                r"optimizer must be.*torch\.optim.*Received: .*StepLR",
            ),
        ],
    ),
    *every(
        "UnsupportedError",
        JAX,
        [
            (
                "polyamp.init(model, Recipe(optimizer=object()))",
                r"optimizer must be.*optax.*Received: builtins\.object",
            ),
            (
                "polyamp.init(model, Recipe(optimizer=nnx.Optimizer(nnx.Linear(3, 2, rngs=nnx.Rngs(0)), "
                "optax.sgd(0.1), "
                "wrt=nnx.Param)))",
                r"optimizer must be.*optax\.GradientTransformation.*Received: flax\..*Optimizer",
            ),
        ],
    ),
    *every(
        "RecipeError",
        TENSORFLOW,
        [
            (
                "polyamp.init(model, Recipe(optimizer=object()))",
                r"optimizer must be.*keras.*Received: builtins\.object",
            ),
            (
                "o = keras.optimizers.SGD()\no.build(model.trainable_variables)\n"
                "polyamp.init(state.model, Recipe(optimizer=o))",
                r"already built for other variables",
            ),
            (
                "polyamp.init(model, Recipe(optimizer=keras.optimizers.SGD(global_clipnorm=1.0), clip_norm=1.0))",
                r"global_clipnorm=1\.0.*clip_norm=1\.0 both clip",
            ),
        ],
    ),
    *every(
        "LossScaleError",
        TENSORFLOW,
        [
            (
                "polyamp.init(model, Recipe(optimizer=keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())))",
                r"scaler wrapped twice.*inner_optimizer",
            ),
        ],
    ),
    *every(
        "PolicyError",
        EVERYWHERE,
        [
            (
                "polyamp.init(model, Recipe(policy=Policy('bf16', overrides={'haed': 'float32'})))",
                r"overrides.*'haed'.*match",
            ),
        ],
    ),
    *every(
        "RecipeError",
        EVERYWHERE,
        [
            ("polyamp.init(model, Recipe(optimizer=type(recipe.optimizer)))", r"optimizer.*Received: the class adamw"),
        ],
    ),
]
