//! The checkout this program was built from, and child processes in it
//!
//! Every command runs in the workspace root with standard input closed, so
//! that nothing ever waits for a person.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use cargo_metadata::{Message, Metadata, MetadataCommand};

/// The workspace root.
pub(crate) fn root() -> &'static Path {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    package.parent().unwrap_or(package)
}

/// The cargo that started this program, in the workspace root.
pub(crate) fn cargo() -> Command {
    command(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
}

/// `program` in the workspace root, with standard input closed.
pub(crate) fn command(program: impl AsRef<std::ffi::OsStr>) -> Command {
    let mut command = Command::new(program);
    command.current_dir(root()).stdin(Stdio::null());
    command
}

/// The command as a person would type it.
pub(crate) fn line(command: &Command) -> String {
    let program = Path::new(command.get_program());
    let name = program.file_name().unwrap_or(program.as_os_str());
    let words = std::iter::once(name).chain(command.get_args());
    words
        .map(|word| {
            let word = word.to_string_lossy();
            if word.is_empty() || word.contains([' ', '*', '\'', '"']) {
                format!("'{word}'")
            } else {
                word.into_owned()
            }
        })
        .collect::<Vec<_>>()
        .join(" ")
}

/// The workspace's own packages, without their dependencies.
pub(crate) fn packages() -> Result<Metadata> {
    MetadataCommand::new()
        .current_dir(root())
        .no_deps()
        .exec()
        .context("cargo metadata failed: is Cargo.toml well formed?")
}

/// A folder below the target directory, created when missing.
pub(crate) fn output_folder(name: &str) -> Result<PathBuf> {
    let folder = packages()?.target_directory.into_std_path_buf().join(name);
    fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
    Ok(folder)
}

/// Builds with `cargo build ARGUMENTS` and returns the one executable that made.
///
/// # Errors
/// If the build fails, or makes no executable or more than one.
pub(crate) fn build_executable(arguments: &[&str]) -> Result<PathBuf> {
    let mut build = cargo();
    build.arg("build").args(arguments);
    let shown = line(&build);
    let output = build
        .arg("--message-format=json-render-diagnostics")
        .stderr(Stdio::inherit())
        .output()
        .with_context(|| format!("cannot start `{shown}`"))?;
    if !output.status.success() {
        bail!("`{shown}` failed; the compiler's messages are above");
    }
    let mut executables = Vec::new();
    for message in Message::parse_stream(output.stdout.as_slice()) {
        if let Message::CompilerArtifact(artifact) = message? {
            executables.extend(artifact.executable);
        }
    }
    match executables.as_slice() {
        [executable] => Ok(executable.clone().into_std_path_buf()),
        [] => bail!("`{shown}` made no executable; is the [[bin]] still in that package?"),
        _ => bail!("`{shown}` made more than one executable: name the one wanted with --bin"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_printed_command_can_be_pasted() {
        let mut shown = command("some/folder/qemu-system-x86_64");
        shown.args(["-trace", "vtd_inv_desc_*", "-append", "case=boot grants=32"]);
        assert_eq!(
            line(&shown),
            "qemu-system-x86_64 -trace 'vtd_inv_desc_*' -append 'case=boot grants=32'"
        );
    }
}
