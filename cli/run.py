"""`aprfmt run`: generate text from a prompt."""

import time
from dataclasses import asdict

import click

from aprfmt.cli import dry_run as dry
from aprfmt.cli import options, output_format, render, run_options


@click.command("run")
@options.gather_options(tokens=run_options.TokenOptions, where=run_options.WhereOptions)
@click.argument("model", type=options.MODEL_RUN)
@run_options.what
@click.option("--max-tokens", type=options.WholeNumber(1), default=128, show_default=True,
              help="Generate at most this many tokens.")  # fmt: skip
@click.option("--temperature", type=options.RealNumber(0, 1e6), default=0.0, show_default=True,
              help="0 takes the likeliest token; above it, tokens are drawn.")  # fmt: skip
@click.option("--top-k", type=options.WholeNumber(0), default=0, show_default=True,
              help="Draw from the k likeliest tokens only (0: from all).")  # fmt: skip
@click.option("--top-p", type=options.RealNumber(0, 1, min_open=True), default=1.0,
              show_default=True,
              help="Draw from the likeliest tokens that add up to this.")  # fmt: skip
@click.option(
    "--seed", type=options.WholeNumber(0), default=0, show_default=True, help="Seed of the draws."
)
@click.option("--ignore-stop", is_flag=True, help="Go on after the model's stop tokens.")
@dry.option
@run_options.where
@options.arch
@options.common
def command(
    model: str, max_tokens: int, ignore_stop: bool, dry_run: bool,
    tokens: run_options.TokenOptions, where: run_options.WhereOptions,
    temperature: float, top_k: int, top_p: float, seed: int,
) -> int:  # fmt: skip
    """Generate text, greedily unless --temperature says otherwise.

    Generation ends at a stop token of the model, at --max-tokens, or at the end of the context.
    """
    if dry_run:
        return dry.report_run(model, tokens, where, max_tokens)
    from aprfmt.cli.run_show import TextWriter, report_speed
    from aprfmt.inference.generating import MadeBeside, Stops, context_room, generate, speed
    from aprfmt.inference.sampling import Sampler, Sampling
    from aprfmt.tokenizer.turn_ends import unstopped_turn

    sampling = Sampling(temperature, top_k, top_p, seed)
    began = time.perf_counter()
    with run_options.open_session(model, where) as run:
        opened = run.model
        ids, text = run_options.token_ids(opened, tokens)
        limit = min(max_tokens, context_room(opened, len(ids)))
        with MadeBeside(lambda: run_options.load_tokenizer(opened)) as tokenizer:
            stop = Stops(tokenizer, run_options.stop_token_ids(opened), ignore=ignore_stop)
            writer = TextWriter(tokenizer, ids, live=output_format.answer_format() != "json")
            load = time.perf_counter() - began
            found, times = generate(run.session, ids, Sampler(sampling), limit, stop, writer.show)
        if tokenizer.result is None:
            known = f"stop tokens as configured: {sorted(stop)}" if stop else "no stop token"
            render.warn(f"{opened.path}: has no tokenizer: ids only; {known}", "no_tokenizer")
        unstopped = unstopped_turn(opened.carried) if tokens.chat is not None else None
        if unstopped is not None and not ignore_stop:
            render.warn(f"{unstopped.says}; {unstopped.todo}", "turn_end")
        stopped = bool(found) and found[-1] in stop
        made = found[:-1] if stopped else found
        full = "max_tokens" if len(made) == max_tokens else "context"
        ran, took = run_options.run_facts(run), speed(len(ids), load, times)
        body = {
            "run": ran,
            "prompt": {"ids": ids, "text": text},
            "ids": made,
            "text": writer.text(made),
            "stop": {"reason": "stop_token" if stopped else full,
                     "token": found[-1] if stopped else None},
            "sampling": asdict(sampling),
            "speed": {**took, "tokenizer_seconds": tokenizer.seconds},
        }  # fmt: skip

    def show() -> None:
        writer.finish(made)
        if not render.is_flag_set("quiet"):
            end = f"stop token {found[-1]}" if stopped else full
            report_speed(ran, len(made), end, took, tokenizer.seconds)

    return render.emit(body, 0, show)
