"""`convert`: plan, then run, then re-open and verify; one pipeline for every pair of formats."""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from aprfmt.arch import check_arch
from aprfmt.base.memory import keep_freed
from aprfmt.base.protocols import LazyTensor, Note, OrderedSink, Sink, TensorInfo
from aprfmt.conversion.options import ConvertOptions, Options
from aprfmt.conversion.output_format import resolve_format, target_format
from aprfmt.conversion.report import ConversionReport, TensorOutcome
from aprfmt.errors import ArchError, ConversionError, FormatError, UsageError
from aprfmt.formats import FormatSpec
from aprfmt.formats.atomic import FileSet, NullFileSet
from aprfmt.formats.mapped_file import MappedFile, MappedSource
from aprfmt.model import Model, open_model
from aprfmt.model.hf_folder import is_written_name
from aprfmt.remote.paths import is_remote

if TYPE_CHECKING:
    from aprfmt.conversion.accounting import Account
    from aprfmt.conversion.metadata import CarriedMetadata
    from aprfmt.conversion.plan import Plan
    from aprfmt.conversion.run import WrittenTensor
    from aprfmt.conversion.source_hash import SourceHash
    from aprfmt.conversion.verification import Verifier
    from aprfmt.formats.resumable_output import ResumableFileSet

__all__ = ["ConversionReport", "Options", "TensorOutcome", "convert", "target_format"]


def convert(
    src: Path | str, dst: Path | str, *, to: str | None = None, **options: Unpack[ConvertOptions]
) -> ConversionReport:
    """Convert a model file or folder from any format to any, and return the report.

    Keyword arguments are the fields of `Options`. Raises ConversionError if the target cannot hold
    the model as asked, OutputError where `dst` exists and `force` is not given, FormatError and
    ArchError for the source.
    """
    chosen = Options(**options)
    if chosen.arch != "none":
        check_arch(chosen.arch)
    if chosen.generic:
        chosen = replace(chosen, arch="none")
    arch = None if chosen.arch == "none" else chosen.arch
    with open_model(
        src, arch=arch, allow_missing=chosen.allow_missing, rename=chosen.rename
    ) as model:
        return convert_model(model, Path(dst), to, chosen)


def convert_model(model: Model, dst: Path, to: str | None, options: Options) -> ConversionReport:
    """Convert an open model into `dst` and return the report; see `convert`.

    `to` names the target format; None takes the one that the name of `dst` implies. The option
    `allow_missing` has no effect here: it was given when the model was opened.
    """
    from aprfmt.conversion.scheduling import prefetch_small_tensors
    from aprfmt.conversion.source_hash import SourceHash
    from aprfmt.conversion.verification import Verifier

    target = resolve_format(model, dst, to)
    hashed = options.source_hash and model.format != target.name and options.arch != "none"
    with ExitStack() as stack:
        verifier = digest = None
        if not options.dry_run:
            keep_freed()
            # Both run in parallel with everything else, the plan included.
            fetched = any(map(is_remote, model.source.files))
            if hashed or (fetched and (options.source_hash or options.verify)):
                digest = stack.enter_context(SourceHash(model.source, hashed))
            verifier = stack.enter_context(Verifier(model.source)) if options.verify else None
        if model.format != target.name:  # else they are copied, with what lies around them
            prefetch_small_tensors(model.source)
        return _run_conversion(model, dst, target, options, hashed, digest, verifier, stack)


def _run_conversion(
    model: Model, dst: Path, target: FormatSpec, options: Options, hashing: bool,
    hashed: "SourceHash | None", verifier: "Verifier | None", stack: ExitStack,
) -> ConversionReport:  # fmt: skip
    """Plan, write and verify one conversion, and return its report.

    `hashing` says whether the source's hash is recorded, `hashed` computes it, `verifier` reads the
    output back. What is opened here, the lock of a resumable run included, is closed when the
    caller leaves `stack`. With `dry_run` nothing is written and the report has estimates.
    """
    from aprfmt.conversion.metadata import HASH_KEY
    from aprfmt.conversion.plan import build_plan
    from aprfmt.conversion.quantize_options import with_mixture
    from aprfmt.conversion.restoration_record import record_restoration as keep_bits
    from aprfmt.conversion.run import WrittenTensor, tensor_outcome
    from aprfmt.conversion.source_hash import PLACEHOLDER

    # The user's options stay as given for the state of a resumable run.
    given = options
    options = with_mixture(model, target, options)
    plan = build_plan(model, target, options)
    keep_bits(model, target, plan)
    carried, absent = _carried_and_absent(model, target, dst, plan, options)
    written = [WrittenTensor() for _ in plan.outputs]
    digest: str | None = None
    begun: ResumableFileSet | None = None
    judged: tuple[int, Account] | None = None
    expected: dict[str, Any] | None = None
    if hashing:
        carried.metadata[HASH_KEY] = PLACEHOLDER
    # Write nothing and estimate, or write, or take over what an earlier run published.
    if options.dry_run:
        from aprfmt.conversion.estimate import estimate_conversion

        sizes = _planned_sizes(model, target, dst, plan, carried, options)
        files = tuple(sizes)
        expected = estimate_conversion(model, dst, plan, sizes, options, hashing)
    else:
        if options.resume:
            begun = _open_resumable(model, target, dst, plan, carried, given)
            stack.callback(begun.release)
        if begun is not None and begun.published:
            from aprfmt.conversion.resume_state import restore_record

            files = tuple(_planned_sizes(model, target, dst, plan, carried, options))
            for output, record in zip(plan.outputs, written, strict=True):
                restore_record(begun, output.info.name, record)
        else:
            files, judged = _write(
                model, target, dst, plan, carried, written, options, hashed, begun, verifier
            )
        digest = hashed.result() if hashed is not None and hashed.recorded else None
        sizes = {path: path.stat().st_size for path in files}
    # Report and verify.
    tensors = tuple(
        tensor_outcome(o, w) for o, w in zip(plan.outputs, written, strict=True) if not o.companion
    )
    verified, accounted = None, None
    damage: list[Note] = []
    if verifier is not None:
        verified, accounted = judged or _verify(files, plan, written, model, verifier)
        damage = verifier.notes(hashed.checksums if hashed is not None else dict)
    if begun is not None:
        begun.finish()
    notes = (*model.notes, *damage, *plan.notes, *_staging_notes(dst, options))
    return ConversionReport(
        model.path, model.format, dst, target.name, files, arch_name(model, options), tensors,
        notes, verified, digest, sizes, absent, carried.verbatim_bytes,
        accounted, begun.kept if begun is not None else 0, expected,
    )  # fmt: skip


def _carried_and_absent(
    model: Model, target: FormatSpec, dst: Path, plan: "Plan", options: Options
) -> "tuple[CarriedMetadata, tuple[str, ...]]":
    """Return (metadata and texts of the output, required roles that the output lacks).

    Raises ConversionError where the plan would lose more than the options allow.
    """
    from aprfmt.conversion.missing_roles import record_missing_roles
    from aprfmt.conversion.preflight import check_planned_losses

    carried = _output_metadata(model, target, plan, options)
    absent = record_missing_roles(carried, model, plan, options)
    if options.verify:
        check_planned_losses(model, _weights_and_folder(target, dst)[0], target.name, plan, carried)
    return carried, absent


def _output_metadata(
    model: Model, target: FormatSpec, plan: "Plan", options: Options
) -> "CarriedMetadata":
    """Return the output's metadata and texts, which record what the options left out.

    Raises ConversionError where companion files would be lost without a flag.
    """
    from aprfmt.conversion.accounting import RECORD, REMOVED, check_files, record_text
    from aprfmt.conversion.metadata import CarriedMetadata, bare_metadata, target_metadata

    if options.arch == "none" and model.format != target.name:
        carried = CarriedMetadata(bare_metadata(model, target, marked=options.generic))
    else:
        carried = target_metadata(model, target.name, plan, options)
    check_files(model, plan.left_out)
    omitted = {name: flag for name, flag in plan.left_out.items() if flag != REMOVED}
    if omitted:
        carried.metadata[RECORD] = record_text(omitted)
    return carried


def arch_name(model: Model, options: Options) -> str | None:
    """Return the architecture's name; None where it is unknown, or not to be used."""
    try:
        return model.spec.name if options.arch != "none" else None
    except ArchError:
        return None


def _staging_notes(dst: Path, options: Options) -> list[Note]:
    """Return [a warning] where the staging folder of an earlier `--resume` run is left, else [].

    With `--resume` itself there is no warning: that run continues.
    """
    from aprfmt.formats.resumable_output import staging_folder

    hidden = staging_folder(dst)
    if options.resume or not hidden.is_dir():
        return []
    text = f"{hidden.name} next to it is of an earlier run with --resume; it may be removed"
    return [Note("warning", str(dst), text, "resume_left")]


def _open_sink(
    model: Model, target: FormatSpec, weights: Path, options: Options, files: FileSet | None
) -> Sink:
    """Return the writer of the target's files, open, with the options that it understands.

    It writes into the set of files `files`. Files of the same format are rewritten like the source.
    """
    from aprfmt.conversion.encoding_choice import stores_as_bytes

    arguments: dict[str, Any] = {"files": files}
    if options.alignment is not None:
        arguments["alignment"] = options.alignment
    if stores_as_bytes(model, target, options):
        arguments["carry"] = True
    alike = target.rewrites and model.format == target.name
    if alike and isinstance(model.source, MappedSource):  # not tensors in place of a file's
        arguments["like"] = model.source
    return target.open_sink(
        weights, force=options.force, max_shard_size=options.max_shard_size, **arguments
    )


def _ordered_outputs(target: FormatSpec, sink: Sink, plan: "Plan") -> list[TensorInfo]:
    """Return the plan's outputs in the order in which the sink or the format stores them."""
    order = sink.order if isinstance(sink, OrderedSink) else target.order
    return order([output.info for output in plan.outputs])


def _planned_sizes(
    model: Model, target: FormatSpec, dst: Path, plan: "Plan", carried: "CarriedMetadata",
    options: Options,
) -> dict[Path, int]:  # fmt: skip
    """Return {path: size in bytes} of every file that would be written; writes nothing."""
    from aprfmt.conversion.estimate import planned_sizes

    weights, _ = _weights_and_folder(target, dst)
    return planned_sizes(
        lambda files: _open_sink(model, target, weights, options, files),
        lambda sink: sink.plan(carried.metadata, _ordered_outputs(target, sink, plan)),
        {weights.parent / name: _encode_text(name, text) for name, text in carried.texts.items()},
    )


def _open_resumable(
    model: "Model", target: FormatSpec, dst: Path, plan: "Plan", carried: "CarriedMetadata",
    options: Options,
) -> "ResumableFileSet":  # fmt: skip
    """Return the set of files of a `--resume` conversion.

    It holds the files that an earlier run of the same source and plan left. `options` are the
    user's, without what follows from the scheme.
    """
    from aprfmt.conversion.resume_state import check_resumable, plan_digest, source_identities
    from aprfmt.formats.resumable_output import ResumableFileSet

    check_resumable(options)
    weights, folder = _weights_and_folder(target, dst)
    sink = _open_sink(model, target, weights, options, NullFileSet())
    sink.plan(carried.metadata, _ordered_outputs(target, sink, plan))
    digest = plan_digest(sink, options, carried.texts)
    files = ResumableFileSet(dst, force=options.force, folder=folder, ours=is_written_name)
    files.begin(source_identities(model), digest)
    return files


def _write(
    model: Model,
    target: FormatSpec,
    dst: Path,
    plan: "Plan",
    carried: "CarriedMetadata",
    written: "list[WrittenTensor]",
    options: Options,
    digest: "SourceHash | None",
    begun: "ResumableFileSet | None",
    verifier: "Verifier | None",
) -> "tuple[tuple[Path, ...], tuple[int, Account] | None]":
    """Write all outputs, publish the files together and return (paths, verification).

    `verifier` reads tensors back while they are written. Resumable outputs (`begun`) are verified
    before they are published: then the verification is (number of tensors, account), else it is
    None. A resumable output that fails is removed, and ConversionError says so.
    """
    from aprfmt.conversion.scheduling import write_tensors
    from aprfmt.conversion.sidecar_files import texts_to_write
    from aprfmt.conversion.source_hash import PLACEHOLDER

    weights, folder = _weights_and_folder(target, dst)
    with begun or FileSet(force=options.force, folder=folder, ours=is_written_name) as files:
        # Refuse to replace another model's files before anything is written.
        texts = texts_to_write(weights, folder, carried.texts, options.force)
        with _open_sink(model, target, weights, options, files) as sink:
            infos = _ordered_outputs(target, sink, plan)
            sink.plan(carried.metadata, infos)
            write_tensors(sink, infos, plan, written, options, begun, verifier, model.source.files)
            # Wait for the other threads, then write the digest into the header.
            if not all(each is None or each.done() for each in (verifier, digest)):
                files.sync()  # the disk ends its work while they end theirs
            if verifier is not None:
                verifier.wait()
            if digest is not None and digest.recorded:
                sink.amend(PLACEHOLDER, digest.result())
            elif digest is not None and options.source_hash:
                digest.check()
            refuse_changed_source(model)
            paths = tuple(sink.files)
        # Companion files, and the check of a resumable run before it is published.
        for path, text in texts.items():
            files.create(path).write(_encode_text(path.name, text))
        text_files = tuple(weights.parent / name for name in carried.texts)
        judged = None
        if begun is not None and verifier is not None:
            begun.close()
            try:
                staged = tuple(map(begun.temporary_path, paths))
                judged = _verify(staged, plan, written, model, verifier)
            except (ConversionError, FormatError) as error:
                begun.reject()
                raise ConversionError(
                    f"{error}; nothing is published and what was staged is removed: the same "
                    "command begins anew"
                ) from error
    return (*paths, *text_files), judged


def refuse_changed_source(model: Model) -> None:
    """Raise FormatError where a local file of the source was written to since it was opened.

    Raises RemoteError where a fetched file changed, as far as that can be known.
    """
    for shard in model.source.shards if isinstance(model.source, MappedSource) else ():
        if isinstance(shard.file, MappedFile):
            shard.file.refuse_changed()
    if any(map(is_remote, model.source.files)):
        from aprfmt.remote.remote_file import refuse_changed

        refuse_changed(model.source.files)


def _encode_text(name: str, text: str) -> bytes:
    """Return a file's text as UTF-8; ConversionError where a character has no UTF-8 form."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise ConversionError(
            f"{name}: character {error.start} of the text the source carries is not UTF-8; "
            "mend the source, or set the key to a text"
        ) from None


def _weights_and_folder(target: FormatSpec, dst: Path) -> tuple[Path, Path | None]:
    """Return (path of the weights, folder of the output, or None for a single file).

    Raises UsageError for a name without extension where the format writes no folders.
    """
    if dst.suffix.lower() in target.extensions:
        return dst, None
    if target.weights_name is None:
        raise UsageError(
            f"{dst}: {target.name} is one file; give it the extension {target.extensions[0]} "
            "(--to safetensors writes a folder)"
        )
    return dst / target.weights_name, dst


def _verify(
    files: tuple[Path, ...], plan: "Plan", written: "list[WrittenTensor]", model: "Model",
    verifier: "Verifier",
) -> "tuple[int, Account]":  # fmt: skip
    """Read the output back and return (number of its tensors, account of the source).

    Tensors that the verifier did not prove equal are compared here. Raises ConversionError where
    one is missing, differs, or something of the source is lost.
    """
    from aprfmt.conversion.accounting import balanced_account
    from aprfmt.conversion.verification import compare_written

    with open_model(entry_file(files)) as result:
        stored: Mapping[str, LazyTensor] = result.source.tensors
        for output, record in zip(plan.outputs, written, strict=True):
            tensor = stored.get(output.info.name)
            if tensor is None:
                raise ConversionError(
                    f"{output.info.name}: was written and is not there on reading"
                )
            found = (tensor.info.shape, tensor.info.encoding, tensor.info.nbytes)
            if found != (output.info.shape, output.info.encoding, output.info.nbytes):
                raise ConversionError(
                    f"{output.info.name}: reads back as {found}; was written as "
                    f"{(output.info.shape, output.info.encoding, output.info.nbytes)}"
                )
            if not verifier.is_proved(output.info.name, tensor):
                compare_written(output, record, tensor)
        return len(plan.outputs), balanced_account(result, model, plan.left_out, plan.edited)


def entry_file(files: tuple[Path, ...]) -> Path:
    """Return the one of an output's files that opens it all: the shard index, else the first."""
    for path in files:
        if path.name.endswith(".index.json"):
            return path
    return files[0]
