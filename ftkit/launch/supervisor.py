"""The supervisor of a run: from its command line to its exit code.

It prepares the run, owns its directory, starts its ranks, and reports how it ended. It is no rank
itself and imports no torch, so it can still name the cause, write the report and leave nothing
behind when a rank is killed.
"""

import dataclasses
import functools
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ftkit.checkpoint.metadata import BASE
from ftkit.data.sources import check_data, check_run_length, pinned, settled
from ftkit.errors import Completed, DoesNotFit, UserError
from ftkit.evaluation.task_programs import FoundTasks
from ftkit.launch.conclude import DamageFound, conclude, note_shortage
from ftkit.launch.interfaces import check_interfaces
from ftkit.launch.preflight import check_second_models, require_room, with_micro_batch
from ftkit.launch.ranks import Ranks
from ftkit.models.pretrained.model_files import has_extra_weights
from ftkit.models.pretrained.model_names import naming
from ftkit.models.pretrained.places import find_here, find_or_download
from ftkit.recipe.adapter_types import method_text
from ftkit.recipe.batches import MicroBatch
from ftkit.recipe.devices import Devices, find_devices
from ftkit.recipe.hubs import as_owner_of
from ftkit.recipe.kernels import check_kernels_installed
from ftkit.recipe.loggers import check_loggers_installed
from ftkit.recipe.lora_layers import adapted_text, names_no_layers
from ftkit.recipe.objectives import model_beside, objective_rules
from ftkit.recipe.options import FinetuneOptions
from ftkit.recipe.own_metric import OwnMetric, own_metrics
from ftkit.recipe.parsing import as_text, read_recipe, sorted_words, to_dict, to_yaml
from ftkit.recipe.plan import Plan, make_plan
from ftkit.recipe.plugin import plugin_in_use
from ftkit.recipe.recipe import ALL_LINEAR, FINETUNE, LoraRecipe, Precision, Recipe
from ftkit.redaction import REMOVED
from ftkit.runs.checkpoints import RunCheckpoints
from ftkit.runs.directory import RunDirectory
from ftkit.runs.job import Job, StopAfter
from ftkit.runs.launchers import ExternalRanks, launched, launchers_here
from ftkit.runs.lock import LOST_S, claim, is_at_work, unwritable
from ftkit.runs.report.report import Restart, read_report
from ftkit.runs.unfinished import follow_moved, require_free, resumes_in_place
from ftkit.runs.url_runs import (
    OtherHosts,
    UploadFailed,
    mirrored,
    require_provider,
    require_unclaimed,
)
from ftkit.utils.console.display import Display
from ftkit.utils.console.terminal import fitted
from ftkit.utils.files import make_reserve, write_durably
from ftkit.utils.json_values import secret_keys, with_secrets_hidden, without_tokens
from ftkit.utils.process import launcher_starts_again, print_line
from ftkit.utils.progress import is_quiet, print_notice, print_shown
from ftkit.utils.urls import display_path
from ftkit.utils.yaml_files import STANDARD_INPUT, dump_yaml

if TYPE_CHECKING:
    from ftkit.runs.resume import Start

_HALVINGS = 2
"""How often a micro-batch that ftkit chose is halved in one command, because memory ran out."""


def run_finetuning(options: FinetuneOptions) -> int:
    """Fine-tune as the command line says, or print the recipe; return the exit code.

    Raises:
        UserError: see `read_recipe` and `launch`.
    """
    recipes, overrides = sorted_words(options.words, options.config, options.keys)
    if str(STANDARD_INPUT) in recipes and launched(options.line) is not None:
        raise UserError(
            "--config is -, standard input, which torchrun and srun do not give to every rank. "
            "Write the recipe to a file: try --config RECIPE.yaml."
        )
    command = options.line[1]
    recipe = read_recipe(recipes, overrides, method=FINETUNE[command], terms=options.terms)
    if command == "finetune_lora" and recipe.method == "full":
        raise UserError(
            f"{recipes[-1]} trains all parameters, but the command is finetune_lora. "
            "Try ftkit finetune, or ftkit finetune_full."
        )
    if options.print_config:
        values = to_dict(recipe)
        print(dump_yaml(with_secrets_hidden(values)), end="")
        if secret := secret_keys(values):
            print_notice(f"ftkit: {REMOVED} is a secret in {', '.join(secret)}", sys.stderr)
        return 0
    metrics = own_metrics(options.metric)
    # Without answers there is nothing to score.
    if metrics and not recipe.eval.max_new_tokens:
        raise UserError(
            f"{metrics[0]} scores answers, but eval.max_new_tokens is "
            f"{'empty' if recipe.eval.max_new_tokens is None else 0}: how long may they be? "
            "Try --eval.max_new_tokens 100."
        )
    # The recipe of a run that was moved or copied still names its old directory.
    if recipes and "out_dir" not in dict(overrides):
        out_dir = follow_moved(recipe.resume, recipe.out_dir, Path(recipes[-1]))
        recipe = dataclasses.replace(recipe, out_dir=out_dir)
    return launch(
        recipe,
        command=options.line,
        overwrite=options.overwrite,
        stop_after=StopAfter.parse(options.stop_after) if options.stop_after is not None else None,
        force=options.force,
        metrics=metrics,
        trusted=options.trust_task_code,
    )


def launch(
    recipe: Recipe,
    *,
    command: Sequence[str],
    overwrite: bool = False,
    stop_after: StopAfter | None = None,
    force: bool = False,
    metrics: tuple[OwnMetric, ...] = (),
    trusted: Path | None = None,
) -> int:
    """Prepare, start and supervise one run; return the exit code of the command.

    Under torchrun or SLURM, which start a process for each rank, this one supervises its rank.

    Args:
        recipe: as requested.
        command: the command line, for the report.
        overwrite: replace what is in out_dir instead of taking another directory.
        stop_after: end this session before the run is done.
        force: start even if memory is certainly too small.
        metrics: of the user's own.
        trusted: directory whose Python code tasks may run.

    Raises:
        UserError: before anything has started, and nothing is left behind.
    """
    began_s = time.monotonic()
    here = launched(command)
    placed = None if here is None else here[1]
    if isinstance(recipe, LoraRecipe) and recipe.adapter is not None:
        from ftkit.recipe.peft_adapter import with_adapter

        recipe = with_adapter(recipe)
    prepare = functools.partial(
        prepare_run,
        command=command,
        began_s=began_s,
        force=force,
        metrics=metrics,
        trusted=trusted,
        placed=placed,
    )
    begin = functools.partial(
        prepare,
        recipe,
        overwrite=overwrite,
        started_at_s=time.time(),
        stop_after=stop_after,
    )
    try:
        if here is not None:
            launcher, placed = here
            return launcher.take_part(placed, recipe, begin, _end)
        if recipe.num_nodes not in ("auto", 1):
            raise UserError(
                f"num_nodes is {recipe.num_nodes}, but this command starts ranks on one machine "
                "only. Start it on every machine with torchrun or srun, or try --num_nodes 1."
            )
        # With resume auto, the next round passes over a checkpoint that has proved damaged.
        doubted: set[Path] = set()
        while True:
            with Ranks() as ranks:
                try:
                    with begin(received=ranks.received) as job:
                        ranks.run(job.directory, job.plan, recipe.data_token)
                        smaller = _smaller(recipe, job, ranks.received)
                        if smaller is None or not note_shortage(job, smaller):
                            return _end(job, ranks.received)
                    # Outside of the block, which held the lock of the directory.
                    again, replaces = _again(recipe, job)
                    begin = functools.partial(
                        prepare,
                        again,
                        overwrite=replaces,
                        started_at_s=time.time(),
                        stop_after=_left_of(job),
                        smaller=smaller,
                    )
                except DamageFound as found:
                    # Damage in a checkpoint that was read as a whole since is not the disk's.
                    is_known = found.checkpoint in doubted
                    if recipe.resume != "auto" or ranks.received or is_known:
                        raise
                    doubted.add(found.checkpoint)
                    print_notice(f"{found.why} Reading all of it ...")
    except Completed as completed:
        print_shown(str(completed))
        return 0
    except UploadFailed as error:
        print_line(f"ftkit: {error}")
        return 1


def _smaller(requested: Recipe, job: Job, received: Sequence[signal.Signals]) -> MicroBatch | None:
    """Half of the micro-batch of a run, if ftkit chose it and may halve it again."""
    before, key = job.plan.chosen, requested.train.auto_key
    if key is not None:
        plan = job.plan
        before = MicroBatch(
            sequences=plan.micro_batch_size,
            tokens=plan.micro_batch_tokens if key == "micro_batch_tokens" else None,
            source="memory",
            halved=0 if job.micro_batch is None else job.micro_batch.halved,
        )
    if before is None or before.halved == _HALVINGS or received:
        return None
    # In one micro-batch or not at all.
    return None if requested.train.optimizer_in_backward else before.half


def _again(requested: Recipe, job: Job) -> tuple[Recipe, bool]:
    """The recipe with which a run starts again in its directory, and whether it replaces that."""
    recipe = dataclasses.replace(requested, out_dir=job.recipe.out_dir, resume="auto")
    # A branch that has saved nothing begins again at the checkpoint of the other run.
    if job.start is not None and job.directory.store.newest() is None:
        return dataclasses.replace(recipe, resume=job.start), True
    return recipe, False


def _left_of(job: Job) -> StopAfter | None:
    """What is left of the steps of a session after those that it saved."""
    stop_after = job.stop_after
    if stop_after is None or stop_after.steps is None:
        return stop_after
    saved = (job.directory.store.newest() or job.start_step) - job.start_step
    return StopAfter(steps=max(1, stop_after.steps - saved))


def _end(job: Job, received: Sequence[signal.Signals]) -> int:
    code = conclude(job, received)
    for launcher in launchers_here():
        launcher.ended(code, received)
    return code


@contextmanager
def prepare_run(
    recipe: Recipe,
    command: Sequence[str],
    overwrite: bool,
    started_at_s: float,
    stop_after: StopAfter | None = None,
    received: Sequence[signal.Signals] = (),
    *,
    began_s: float,
    force: bool = False,
    metrics: tuple[OwnMetric, ...] = (),
    trusted: Path | None = None,
    placed: ExternalRanks | None = None,
    others: OtherHosts | None = None,
    smaller: MicroBatch | None = None,
) -> Iterator[Job]:
    """The job of a run: every setting checked, its base model at hand, its directory claimed.

    Args:
        recipe: as requested.
        command: the command line, for the report.
        overwrite: replace what is in out_dir.
        started_at_s: when the command started, in seconds since the epoch.
        stop_after: end this session before the run is done.
        received: signals so far.
        began_s: when the command started, by `time.monotonic`.
        force: start even if memory is certainly too small.
        metrics: of the user's own.
        trusted: directory whose Python code tasks may run.
        placed: this process, if torchrun or SLURM has started it.
        others: hosts that share no disk with this one.
        smaller: micro-batch of a run that starts again after a shortage of memory.

    Raises:
        UserError: and everything is as it was.
        Completed: the run that was to be continued is complete.
    """
    # Settings that need nothing but this machine come first: a refusal takes a moment.
    require_provider(recipe.out_dir)
    if recipe.resume is not False:
        # Only a run that continues another one calls these.
        from ftkit.runs.restarts import restarts_of
        from ftkit.runs.resume import (
            check_plugin,
            copy_rows,
            find_start,
            ready_to_go_on,
            verify_start,
        )

        check_plugin(recipe)
    recipe = settled(recipe)
    preference = objective_rules(recipe.objective).preference
    check_data(recipe.data, recipe.eval.sets, preference=preference)
    check_run_length(recipe)
    FoundTasks.find(recipe.eval.tasks or (), key="eval.tasks", trusted=trusted)
    requested = recipe
    devices = find_devices(
        recipe.accelerator,
        recipe.devices if placed is None else placed.local_world_size,
        on_asking=lambda: print_notice("asking torch about the devices ..."),
    )
    if placed is not None:
        # The launcher has decided: its processes are the ranks, whatever the recipe says.
        count, nodes = placed.devices_and_nodes(devices)
        recipe = dataclasses.replace(recipe, devices=count, num_nodes=nodes)
    with_any_batch = recipe
    # Before the plan, which needs a number in place of auto.
    recipe = with_micro_batch(recipe, devices, smaller)
    plan = make_plan(recipe, devices, chosen=smaller)
    # What is missing shows now, and not when the ranks have loaded a model.
    plan.rules.check_installed()
    check_kernels_installed(recipe.kernels, plan.accelerator, compiles=recipe.compile)
    check_loggers_installed(recipe.extra_loggers)
    check_interfaces(plan.communication)
    if overwrite and smaller is None and recipe.resume is not False:
        raise UserError(
            f"resume is {recipe.resume}, but --overwrite would remove the checkpoint to continue "
            "from. Leave one of the two out: try --resume false."
        )
    wanted = recipe.out_dir.expanduser()
    in_place = resumes_in_place(recipe.resume, wanted)
    with ExitStack() as stack:
        # A run that is continued in its directory locks it before anything there is read: a run at
        # work may be writing it. A new run claims its place last, when all else is settled.
        if in_place:
            # A run that lost a machine takes a while to notice that, and to end.
            patience_s = LOST_S if launcher_starts_again() else 0.0
            run = stack.enter_context(claim(wanted, "go_on", patience_s=patience_s))
            mirror = stack.enter_context(
                mirrored(run, print_notice, received, goes_on=True, several=others is not None)
            )
            # Under the lock: a run that is running writes its next checkpoint under such a name.
            run.store.remove_leftovers()
        start = None if recipe.resume is False else find_start(recipe)
        default = plan.precision
        if start is not None:
            any_batch = dataclasses.replace(with_any_batch, **start.kept)
            recipe = dataclasses.replace(recipe, **start.kept)
            if start.kept.get("precision", default) != default:
                recipe, plan = _plan_as_saved(any_batch, devices, start, smaller)
            chosen = smaller or _saved_micro_batch(start, plan)
            plan = make_plan(recipe, devices, chosen=chosen)
        # A checkpoint has what it needs of its models, whose files may be gone.
        if start is None:
            check_second_models(recipe)
        # A complete run has ended the command by now, without a prediction, which takes seconds.
        chosen = require_room(plan, devices, command, force=force)
        # Once for all ranks and sessions: what a name means on a hub may change meanwhile.
        with as_owner_of(recipe.data_token):
            data = pinned(recipe.data, None if start is None else start.data)
        recipe = dataclasses.replace(recipe, data=data)
        # May download gigabytes, so a run that certainly does not fit is refused before.
        base = _find_base(recipe, start)
        reference = _find_reference(recipe, start)
        beside = _find_beside(recipe)
        if not in_place:
            require_unclaimed(wanted, print_notice)
            place = RunCheckpoints(path=wanted, store=RunDirectory(wanted).store)
            if not overwrite and not is_at_work(place):  # then another directory is taken
                require_free(wanted, recipe.method)
            run = stack.enter_context(claim(wanted, "overwrite" if overwrite else "new"))
            if run.path != wanted:
                own = display_path(run.path)
                text = f"{display_path(wanted)} holds another run: this one is written to {own}"
                print_notice(fitted(text, sys.stdout))
            mirror = stack.enter_context(mirrored(run, print_notice, received, goes_on=False))
        if start is not None:
            with Display(None) as display:
                kept = start.kept
                start = verify_start(start, recipe, display, interrupted=lambda: bool(received))
                # What is planned stays, also if an earlier checkpoint is the one that is intact.
                start = dataclasses.replace(start, kept=kept)
        restarts: tuple[Restart, ...] = ()
        if in_place or start is not None:
            restarts = restarts_of(
                run, start, world_size=plan.world_size, started_at_s=started_at_s
            )
        job = Job(
            recipe=dataclasses.replace(recipe, out_dir=run.path),
            devices=devices,
            base=base or str(run.base),
            micro_batch=chosen or smaller,
            reference=reference,
            beside=beside,
            command=tuple(without_tokens(command)),
            started_at_s=started_at_s,
            began_s=began_s,
            start=str(start.checkpoint) if start else None,
            start_step=start.metadata.step if start else 0,
            stop_after=stop_after,
            changes=start.changes if start else (),
            restarts=restarts,
            quiet=is_quiet(),
            metrics=metrics,
            trusted=None if trusted is None else str(trusted.expanduser().resolve()),
            plugin=plugin_in_use(),
        )
        # From here on the directory changes; a UserError still puts everything back.
        try:
            if in_place:
                stack.enter_context(ready_to_go_on(run, start))
            with Display(run.path) as display:
                if start is not None:
                    if base is None:  # the checkpoint may be deleted while the run continues
                        shutil.copytree(start.checkpoint / BASE, run.base)
                    if not start.in_place:
                        copy_rows(start, run)
                    _show_start(start, run, display, default)
                if placed is not None and (notice := placed.notice(requested.num_nodes)):
                    display.message(notice)
                display.message(_beginning(job.plan, [*devices.names, "CPU"][0]))
            # The recipe in out_dir starts the same run again elsewhere; `resume` says what this
            # command did.
            written = dataclasses.replace(job.recipe, resume=False)
            if requested.num_nodes == "auto":  # also for the next start, wherever that is
                written = dataclasses.replace(written, num_nodes="auto")
            write_durably(run.recipe, to_yaml(written))
            if job.plugin is not None:
                write_durably(run.plugin, job.plugin.source)
            job.write(run.job)
            # Last, when everything else has had room.
            make_reserve(run.reserve)
            if mirror is not None:
                has_begun = functools.partial(_has_begun, run, job.start_step)
                mirror.begin(has_begun, overwrites=not in_place, others=others)
        except OSError as error:
            raise unwritable(run.path, error) from None
        yield job


def _saved_micro_batch(start: "Start", plan: Plan) -> MicroBatch | None:
    """The micro-batch of a checkpoint, with which the same layout gives the same bits again."""
    saved = start.metadata.layout
    there = (saved.accelerator, saved.strategy, saved.devices, saved.num_nodes, saved.precision)
    here = (plan.accelerator, plan.strategy, plan.devices, plan.num_nodes, plan.precision)
    usual = None if plan.chosen is None else plan.chosen.tokens
    # Without a number of tokens, the whole step or one sequence is the only choice there is.
    if usual is None or plan.mesh.context > 1 or here != there:
        return None
    # More than usual is of ranks that shared their rows.
    if (saved.micro_batch_tokens or 0) > usual:
        return None
    found = MicroBatch(
        sequences=saved.micro_batch_size, tokens=saved.micro_batch_tokens, source="checkpoint"
    )
    same = (found.sequences, found.tokens) == (plan.micro_batch_size, plan.micro_batch_tokens)
    return None if same else found


def _plan_as_saved(
    recipe: Recipe, devices: Devices, start: "Start", smaller: MicroBatch | None
) -> tuple[Recipe, Plan]:
    """Plan a run in the precision of its checkpoint; returns the recipe with its micro-batch.

    Raises:
        UserError: these devices cannot compute in it.
    """
    try:
        recipe = with_micro_batch(recipe, devices, smaller)
        return recipe, make_plan(recipe, devices)
    except DoesNotFit:
        raise
    except UserError as error:
        raise UserError(
            f"{error}\nThe run of {display_path(start.checkpoint)} was trained in "
            f"{recipe.precision}, in which it continues where no precision is named."
        ) from None


def _find_base(recipe: Recipe, start: "Start | None") -> str | None:
    """The base model; None: the checkpoint has all that is needed of it."""
    name, token = recipe.checkpoint_dir, recipe.access_token
    if name.startswith("random:"):
        if start is not None:
            raise UserError(
                f"checkpoint_dir is {name}, but the checkpoint {start.checkpoint} was made from "
                f"{start.metadata.base.name}. Try --checkpoint_dir {start.metadata.base.name}."
            )
        return name
    # A full fine-tune has its own weights: of the base it needs settings and tokenizer, which the
    # checkpoint has, and the weights of parts that are not trained, which it has not.
    if start is not None and recipe.method == "full" and not recipe.train.trains_part:
        saved = start.checkpoint / BASE
        if saved.is_dir() and not has_extra_weights(saved):
            return None
    try:
        return str(find_or_download(name, token=token).resolve())
    except UserError as error:
        if start is None:
            raise
        raise UserError(
            f"{error}\n"
            f"The checkpoint {start.checkpoint} continues from the base model "
            f"{start.metadata.base.name}: give its path with --checkpoint_dir PATH."
        ) from None


def _find_reference(recipe: Recipe, start: "Start | None") -> str | None:
    """The reference whose log-probabilities are computed before the first step.

    None: there is none, or a checkpoint has what it computed.
    """
    if recipe.reference is None or model_beside(recipe) is not None:
        return None
    with naming("reference"):
        if start is not None:  # it is needed for further samples alone, and may be gone
            found = find_here(recipe.reference)
        else:
            found = find_or_download(recipe.reference, token=recipe.access_token)
    return None if found is None else str(found.resolve())


def _find_beside(recipe: Recipe) -> str | None:
    """The frozen model that is held beside the trained one; None: there is none."""
    beside = model_beside(recipe)
    if beside is None or beside.name.startswith("random:"):
        return None if beside is None else beside.name
    with naming(beside.key):
        return str(find_or_download(beside.name, token=recipe.access_token).resolve())


def _show_start(start: "Start", run: RunDirectory, display: Display, default: Precision) -> None:
    """Show where a run continues, and what stays as it was; `default` is the plan's precision."""
    for why in start.passed_over:
        display.warning(f"{why} It is kept in {display_path(run.backups)}.")
    from ftkit.runs.resume import lost_rows

    if lost := lost_rows(start, run):
        display.warning(lost)
    display.message(
        f"continuing from step {start.metadata.step:,}: {display_path(start.checkpoint)}"
    )
    kept = dict(start.kept)
    precision = kept.pop("precision", default)
    if precision != default:
        display.message(f"precision {precision}, as in the checkpoint; here {default} is usual")
    if kept:
        words = ", ".join(f"{key} {as_text(value, key)}" for key, value in kept.items())
        display.message(f"kept, as the defaults were when the run began: {words}")
    for change in start.changes:
        display.message(f"changed: {change}")


def _has_begun(run: RunDirectory, start_step: int) -> bool:
    """Return whether a step was done: until then a mistake leaves everything as it was."""
    if (run.store.newest() or 0) > start_step:
        return True
    try:
        progress = read_report(run.rank(0).report).progress
    except UserError:  # not there yet
        return False
    return progress is not None and progress.steps > start_step


def _beginning(plan: Plan, device: str) -> str:
    """Message for the longest wait of the preparation, until ranks have imported torch."""
    recipe = plan.recipe
    ranks = "1 process" if plan.world_size == 1 else f"{plan.world_size} processes"
    method = method_text(recipe.method, getattr(recipe, "peft", None))
    lines = [
        f"starting {ranks} on {device} ({plan.strategy}, {plan.precision})",
        f"{method} fine-tuning of {recipe.checkpoint_dir}",
        f"into {display_path(recipe.out_dir)}",
    ]
    if isinstance(recipe, LoraRecipe) and recipe.lora_targets == ALL_LINEAR:
        # Earlier versions adapted fewer layers where none was named.
        fewer = "; --lora_query true: query and value only" * names_no_layers(recipe)
        lines.insert(2, f"adapting {adapted_text(recipe)}{fewer}")
    return "\n".join(lines)
