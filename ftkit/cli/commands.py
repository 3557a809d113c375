"""The table of commands: help, options, the function that runs each, and examples."""

from ftkit.cli.command import FIND_RESULT, Command, Group
from ftkit.planning.gpus import GPUS
from ftkit.recipe.options import (
    ChatOptions,
    CheckpointOptions,
    CheckpointsOptions,
    CleanOptions,
    DataOptions,
    DiffOptions,
    EvaluateOptions,
    ExtensionsOptions,
    FinetuneOptions,
    GenerateOptions,
    PlanOptions,
)
from ftkit.recipe.recipe import FINETUNE
from ftkit.recipe.recipe_sections import CORE_RECIPES
from ftkit.utils.registry import Registry

_ELSEWHERE = {
    "finetune": {"train": "", "sft": "", "tune": ""},
    "finetune_lora": {"finetune_adapter": ""},
}
_FINETUNE_SUMMARY = {
    "finetune": "fine-tune with LoRA or QLoRA (the same as finetune_lora)",
    "finetune_lora": "fine-tune with LoRA or QLoRA",
    "finetune_full": "fine-tune every parameter",
}

# One command for each method; `finetune` is the usual name of finetune_lora.
_FINETUNING = tuple(
    Command(
        name=name,
        summary=_FINETUNE_SUMMARY[name],
        text=str(CORE_RECIPES[method].__doc__),
        options=FinetuneOptions,
        function="ftkit.launch.supervisor:run_finetuning",
        usage=("[RECIPE.yaml ...] [CHECKPOINT_DIR] [--KEY VALUE ...]",),
        examples=(
            "TinyLlama/TinyLlama_v1.1 --data JSON --data.path FILE",
            f"recipes/tiny-llama-{method}.yaml --optimizer.lr 1e-4",
            "--data.help JSON",
        ),
        elsewhere=_ELSEWHERE.get(name, {}),
    )
    for name, method in FINETUNE.items()
)

_CHECKPOINTS = Group(
    name="checkpoints",
    summary="list, show, verify, delete or compare the checkpoints of runs",
    text="Manage the checkpoints of a run, in OUT_DIR/checkpoints.",
    usage="COMMAND OUT_DIR [--KEY VALUE ...]",
    epilog="Example: ftkit checkpoints list out/finetune/lora. ftkit checkpoints COMMAND --help "
    "explains a command.",
    members=(
        Command(
            name="checkpoints list",
            summary="show the checkpoints of a run, whether each is complete, and leftovers of "
            "crashes",
            options=CheckpointsOptions,
            function="ftkit.cli.checkpoints:list_checkpoints",
            examples=("out/finetune/lora --format json",),
        ),
        Command(
            name="checkpoints show",
            summary="show the metadata of a checkpoint: training, hardware, files",
            options=CheckpointOptions,
            function="ftkit.cli.checkpoints:show_checkpoint",
            examples=("out/finetune/lora 1500",),
        ),
        Command(
            name="checkpoints verify",
            summary="compare every file with its checksum",
            text="Compare every file with its checksum. The exit code is 1 if any is damaged.",
            options=CheckpointOptions,
            function="ftkit.cli.checkpoints:verify_checkpoints",
            examples=("out/finetune/lora",),
        ),
        Command(
            name="checkpoints clean",
            summary="delete old checkpoints and leftovers of crashes",
            text="Delete old checkpoints and leftovers of crashes. Keeps damaged ones, and those "
            "that the recipe keeps with checkpoint.keep_every and checkpoint.keep_best.",
            options=CleanOptions,
            function="ftkit.cli.checkpoints:clean_checkpoints",
            examples=("out/finetune/lora --keep_last 1 --dry_run",),
        ),
        Command(
            name="checkpoints diff",
            summary="show which fields differ between the recipes of two checkpoints, or of the "
            "newest ones of two runs",
            options=DiffOptions,
            function="ftkit.cli.checkpoints:compare_recipes",
            examples=("out/finetune/lora out/finetune/lora-2",),
        ),
    ),
)

COMMANDS: Registry[Command | Group] = Registry(
    "commands",
    (Command, Group),
    core=(
        *_FINETUNING,
        Command(
            name="plan",
            summary="predict memory, disk and steps before anything is loaded",
            text="Predict what ftkit finetune with the same arguments would need on this machine, "
            "or with --gpu on another: memory of each rank by category, host memory, disk space, "
            "steps. No weights are loaded or downloaded, and no GPU is needed. For a hub name, "
            "config.json and the tokenizer are downloaded if the hub can be reached; otherwise the "
            "sizes are those of LitGPT's model of this name. Several recipes, the runs of a sweep "
            "and variations are shown in one table. The first word may be the command, which sets "
            "the method; without it, recipes without LoRA keys and without quantize are planned as "
            "full fine-tuning, all others as LoRA. The exit code is 3 if the run does not fit, or "
            f"none of several. GPUs by name: {', '.join(GPUS)}.",
            options=PlanOptions,
            function="ftkit.planning.command:plan_all",
            usage=("[COMMAND] [RECIPE.yaml | SWEEP.yaml ...] [CHECKPOINT_DIR] [--KEY VALUE ...]",),
            examples=(
                "recipes/open-llama-7b-full.yaml --precision bf16-true --gpu a100-80gb",
                "finetune_full TinyLlama/TinyLlama_v1.1 --gpu 24GiB",
                "recipes/*.yaml --gpu 24GiB",
                "recipes/sweeps/single_gpu.yaml --gpu a100-80gb",
                "recipes/tiny-llama-full.yaml --sweep train.micro_batch_size=1,2,4,8",
            ),
        ),
        Command(
            name="data",
            summary="inspect the data of a recipe: records, lengths, tokens, problems",
            text="Inspect the data of a recipe before training: how records are used, their "
            "lengths, which tokens are trained, duplicates, and problems with suggested changes. "
            "Needs only the tokenizer and the data: no weights are loaded or downloaded, and no "
            "GPU is needed.",
            options=DataOptions,
            function="ftkit.data.inspection.command:show_data",
            usage=("[RECIPE.yaml ...] [CHECKPOINT_DIR] [--show N] [--KEY VALUE ...]",),
            examples=(
                "recipes/quickstart.yaml",
                "TinyLlama/TinyLlama_v1.1 --data JSON --data.path FILE",
                "recipes/quickstart.yaml --format html --out data.html",
            ),
        ),
        _CHECKPOINTS,
        Command(
            name="generate",
            summary="answer one prompt or many with the result of a run, or any model",
            text="Answer prompts with a result: the adapter or model of a run, one of its "
            "checkpoints, an adapter, or a base model. Prompts are built as in training.",
            options=GenerateOptions,
            opens=FIND_RESULT,
            function="ftkit.evaluation.generate:generate",
            examples=(
                "out/finetune/lora --prompt 'Tell me a story.' --temperature 0.8",
                "out/finetune/lora --prompts questions.txt --out answers.jsonl",
                "out/finetune/lora --prompt 'Tell me a story.' --compare_base",
            ),
            elsewhere={"infer": "", "inference": "", "predict": ""},
        ),
        Command(
            name="chat",
            summary="chat with the result of a run, or any model",
            text="Chat with a result, line by line. Ctrl+C stops an answer, Ctrl+D exits. Earlier "
            "turns are part of the prompt if there is a chat template or the prompt style supports "
            "them (llama3, r1).",
            options=ChatOptions,
            opens=FIND_RESULT,
            function="ftkit.evaluation.chat:chat",
            examples=("out/finetune/lora --temperature 0.8",),
        ),
        Command(
            name="evaluate",
            summary="evaluate a result on held-out data, or on tasks of the lm-evaluation-harness",
            text="Evaluate a result on the validation data of its run, as the run did: the "
            "numbers equal those it reported. With --data, use other data; a single file is used "
            "whole, unless --data.val_split_fraction is given. With --tasks, run tasks of the "
            "lm-evaluation-harness instead.",
            options=EvaluateOptions,
            opens=FIND_RESULT,
            function="ftkit.evaluation.evaluate:evaluate",
            examples=(
                "out/finetune/lora",
                "out/finetune/lora --data JSON --data.path held_out.json",
                "out/finetune/lora --tasks arc_easy,my_task.yaml --limit 100",
            ),
            elsewhere={"eval": "", "test": ""},
        ),
        Command(
            name="extensions",
            summary="list extensions and other packages with what they bring",
            text="List the extensions that come with ftkit, and installed packages that extend "
            "it: what each brings, and whether its libraries are there. A package names what it "
            "brings by entry points; nothing of it is imported before it is used.",
            options=ExtensionsOptions,
            function="ftkit.cli.extensions:show_extensions",
            examples=("", "--format json"),
        ),
    ),
)
"""Every command and group of commands by its first word."""

FTKIT = Group(
    name="",
    summary="",
    text="Fine-tune language models on the hardware you happen to have.",
    usage="[-h] [--version] COMMAND ...",
    epilog="ftkit COMMAND --help explains a command.",
    members=COMMANDS,
)
"""The whole command line."""
