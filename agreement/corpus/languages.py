"""Languages: what kind of text a file is, by its name alone."""

from __future__ import annotations

from pathlib import PurePosixPath

PROSE = "prose"

_BY_NAME = {
    "cmakelists.txt": "cmake",
    "dockerfile": "dockerfile",
    "makefile": "make",
    "gnumakefile": "make",
    "authors": PROSE,
    "changelog": PROSE,
    "contributing": PROSE,
    "copying": PROSE,
    "license": PROSE,
    "news": PROSE,
    "notice": PROSE,
    "readme": PROSE,
}

_BY_EXTENSION = {
    extension: language
    for language, extensions in {
        "ada": "adb ads",
        "assembly": "s asm",
        "c": "c h",
        "c++": "cc cpp cxx hh hpp hxx ipp",
        "clojure": "clj cljc cljs",
        "cmake": "cmake",
        "csharp": "cs",
        "css": "css less scss",
        "csv": "csv tsv",
        "cuda": "cu cuh",
        "d": "d",
        "dart": "dart",
        "elixir": "ex exs",
        "erlang": "erl hrl",
        "fortran": "f f90 f95",
        "fsharp": "fs fsi fsx",
        "glsl": "comp frag glsl vert",
        "go": "go",
        "groovy": "gradle groovy",
        "haskell": "hs lhs",
        "html": "htm html xhtml",
        "ini": "cfg conf ini",
        "java": "java",
        "javascript": "cjs js jsx mjs",
        "json": "json json5 jsonc jsonl",
        "julia": "jl",
        "kotlin": "kt kts",
        "lisp": "cl el lisp scm rkt",
        "lua": "lua",
        "make": "mak mk",
        "metal": "metal",
        "nim": "nim",
        "nix": "nix",
        "notebook": "ipynb",
        "objective-c": "m mm",
        "ocaml": "ml mli",
        "pascal": "pas pp",
        "perl": "pl pm",
        "php": "php",
        "powershell": "ps1 psm1",
        PROSE: "adoc markdown md mdx org rst tex text txt",
        "protobuf": "proto",
        "python": "py pyi pyw pyx",
        "r": "r",
        "ruby": "rb rake",
        "rust": "rs",
        "scala": "sbt scala",
        "shell": "bash fish sh zsh",
        "sql": "sql",
        "swift": "swift",
        "tcl": "tcl",
        "terraform": "hcl tf",
        "toml": "toml",
        "typescript": "cts mts ts tsx",
        "verilog": "sv v vh",
        "vhdl": "vhd vhdl",
        "vue": "vue svelte",
        "xml": "svg xml xsd xsl",
        "yaml": "yaml yml",
        "zig": "zig",
    }.items()
    for extension in extensions.split()
}


def language_of(name: str) -> str:
    """Return the language of a file by its name, e.g. `python`; `prose` for text meant for people; else empty."""
    path = PurePosixPath(name.lower())
    return _BY_NAME.get(path.name) or _BY_EXTENSION.get(path.suffix[1:], "")
