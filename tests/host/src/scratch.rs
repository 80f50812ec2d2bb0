//! Scratch copies of the sources, and patches that break them.
//!
//! A [`Scratch`] is a workspace of its own with some folders of this one. It stays between
//! runs, and only what differs is written, so that only what changed is built again. A
//! [`Patch`] changes one place of it for as long as something is run.

use std::{
    error, fmt, fs, io,
    path::{Path, PathBuf},
    process::Command,
};

/// One place of the sources, and what it becomes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Patch<'a> {
    /// From the workspace's root.
    pub file: &'a str,
    /// Occurs once in the file.
    pub old: &'a str,
    /// What is there instead.
    pub new: &'a str,
}

/// Why a place was not changed.
#[derive(Debug)]
pub enum PatchError {
    /// The file cannot be read or written.
    Io(io::Error),
    /// The text is not there exactly once: the sources have changed.
    Occurs(usize),
}

impl fmt::Display for PatchError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Io(error) => write!(f, "the file cannot be read or written: {error}"),
            Self::Occurs(times) => write!(f, "the old text occurs {times} times, not once"),
        }
    }
}

impl error::Error for PatchError {}

impl From<io::Error> for PatchError {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

impl Patch<'_> {
    /// A file's text with the place changed.
    ///
    /// # Errors
    /// [`PatchError::Occurs`] if there is not exactly one such place.
    pub fn apply(&self, text: &str) -> Result<String, PatchError> {
        match text.matches(self.old).count() {
            1 => Ok(text.replace(self.old, self.new)),
            times => Err(PatchError::Occurs(times)),
        }
    }
}

/// A copy of some folders of the workspace.
#[derive(Debug)]
pub struct Scratch {
    tree: PathBuf,
    target: PathBuf,
}

impl Scratch {
    /// Copies the manifest and `folders`, each file changed by `edit`, to below `home`.
    /// `crates` stands for all of them; any other folder is one package.
    ///
    /// # Errors
    /// If something cannot be read or written, or the manifest has no list of members.
    pub fn new(
        workspace: &Path,
        home: &Path,
        folders: &[&str],
        edit: impl Fn(&str, String) -> String,
    ) -> io::Result<Self> {
        let (tree, target) = (home.join("tree"), home.join("target"));
        for folder in folders {
            copy_folder(workspace, &tree, folder, &edit)?;
        }
        write(&tree.join("Cargo.lock"), &fs::read(workspace.join("Cargo.lock"))?)?;
        let manifest = fs::read_to_string(workspace.join("Cargo.toml"))?;
        let manifest = with_members(&manifest, folders).ok_or(io::ErrorKind::InvalidData)?;
        write(&tree.join("Cargo.toml"), edit("Cargo.toml", manifest).as_bytes())?;
        Ok(Self { tree, target })
    }

    /// Where the copy is.
    #[must_use]
    pub fn tree(&self) -> &Path {
        &self.tree
    }

    /// Cargo, to be run on the copy, without network.
    #[must_use]
    pub fn cargo(&self) -> Command {
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        let mut command = Command::new(cargo);
        command
            .current_dir(&self.tree)
            .env("CARGO_NET_OFFLINE", "true")
            .env("CARGO_TARGET_DIR", &self.target)
            .env("CARGO_PROFILE_DEV_DEBUG", "0")
            .env("CARGO_TERM_COLOR", "never")
            .env("RUST_BACKTRACE", "0");
        command
    }

    /// Runs something with one place changed, which is whole again afterwards.
    ///
    /// # Errors
    /// [`PatchError`]; then nothing was run.
    pub fn patched<R>(
        &self,
        patch: &Patch<'_>,
        run: impl FnOnce(&Self) -> R,
    ) -> Result<R, PatchError> {
        let file = self.tree.join(patch.file);
        let whole = fs::read_to_string(&file)?;
        fs::write(&file, patch.apply(&whole)?)?;
        let result = run(self);
        fs::write(&file, whole)?;
        Ok(result)
    }
}

/// Writes only what differs, so that cargo sees no change where there is none.
fn write(to: &Path, bytes: &[u8]) -> io::Result<()> {
    if fs::read(to).is_ok_and(|old| old == bytes) {
        return Ok(());
    }
    if let Some(parent) = to.parent() {
        fs::create_dir_all(parent)?;
    }
    fs::write(to, bytes)
}

/// Makes a folder of `tree` what it is in the workspace, but for the edits.
fn copy_folder(
    workspace: &Path,
    tree: &Path,
    folder: &str,
    edit: &impl Fn(&str, String) -> String,
) -> io::Result<()> {
    let (from, to) = (workspace.join(folder), tree.join(folder));
    fs::create_dir_all(&to)?;
    for entry in fs::read_dir(&to)? {
        let path = entry?.path();
        let gone = path.file_name().is_none_or(|name| !from.join(name).exists());
        match (gone, path.is_dir()) {
            (true, true) => fs::remove_dir_all(path)?,
            (true, false) => fs::remove_file(path)?,
            (false, _) => {}
        }
    }
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let name = format!("{folder}/{}", entry.file_name().to_string_lossy());
        if entry.path().is_dir() {
            copy_folder(workspace, tree, &name, edit)?;
        } else {
            let text = fs::read_to_string(entry.path())?;
            write(&tree.join(&name), edit(&name, text).as_bytes())?;
        }
    }
    Ok(())
}

/// The workspace's manifest with no other members than those copied.
fn with_members(manifest: &str, folders: &[&str]) -> Option<String> {
    let (before, list) = manifest.split_once("members = [")?;
    let (_, after) = list.split_once(']')?;
    let member = |folder: &&str| match *folder {
        "crates" => String::from("\"crates/*\""),
        one => format!("\"{one}\""),
    };
    let members: Vec<String> = folders.iter().map(member).collect();
    Some(format!("{before}members = [{}]{after}", members.join(", ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_changed_only_if_it_is_the_only_one() {
        let patch = |old| Patch { file: "any", old, new: "three" };
        assert_eq!(patch("two").apply("one two").ok().as_deref(), Some("one three"));
        for (old, times) in [("four", 0), ("one", 2)] {
            let error = patch(old).apply("one one two");
            assert!(matches!(error, Err(PatchError::Occurs(found)) if found == times));
        }
    }
}
