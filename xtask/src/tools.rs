//! Programs this project needs that cargo cannot build
//!
//! `ensure` returns when the tool is there. A missing one is installed with the
//! system's package manager if this user may do that without being asked for a
//! password; otherwise the error holds the exact command to run.

use std::env;
use std::io;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

use crate::checkout;

/// A program outside the Rust toolchain.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Tool {
    /// The PC emulator, with its VT-d and NVMe devices.
    Qemu,
    /// The instrumentation framework that holds callgrind.
    Valgrind,
    /// The PC emulator whose processors have VMX, with its firmware and a display that needs none.
    Bochs,
    /// What makes a disc that starts the testbed through GRUB.
    Grub,
}

impl Tool {
    /// The name of the program on the search path.
    pub(crate) fn program(self) -> &'static str {
        match self {
            Self::Qemu => "qemu-system-x86_64",
            Self::Valgrind => "valgrind",
            Self::Bochs => "bochs",
            Self::Grub => "grub-mkrescue",
        }
    }

    /// What must be there besides, in packages of its own: programs by name, files by path.
    fn companions(self) -> &'static [&'static str] {
        match self {
            Self::Qemu | Self::Valgrind => &[],
            Self::Bochs => &[
                "/usr/share/bochs/BIOS-bochs-latest",
                "/usr/share/bochs/VGABIOS-lgpl-latest",
                "/usr/lib/x86_64-linux-gnu/bochs/plugins/libbx_term_gui.so",
            ],
            Self::Grub => &["xorriso", "mformat", "/usr/lib/grub/i386-pc/multiboot2.mod"],
        }
    }

    /// The first part of it that is missing.
    fn missing(self) -> Option<&'static str> {
        let parts = std::iter::once(self.program()).chain(self.companions().iter().copied());
        parts.into_iter().find(|part| !on_path(part))
    }
}

/// One package manager: how it is found, what it runs, what it calls each tool.
struct Manager {
    program: &'static str,
    /// Commands to run in order; the package names follow the last one. Only that one must succeed.
    commands: &'static [&'static str],
    /// Options for an unattended run, such as waiting for another installation to end.
    unattended: &'static [&'static str],
    qemu: &'static str,
    valgrind: &'static str,
    /// Several packages; nothing where it is not known that they make up what is needed.
    bochs: Option<&'static str>,
    grub: Option<&'static str>,
}

/// A machine that has just been created has no package lists: refresh them first.
const MANAGERS: &[Manager] = &[
    Manager {
        program: "apt-get",
        commands: &["apt-get update", "apt-get install -y --no-install-recommends"],
        unattended: &["-o", "DPkg::Lock::Timeout=300"],
        qemu: "qemu-system-x86",
        valgrind: "valgrind",
        bochs: Some("bochs bochs-term bochsbios vgabios"),
        grub: Some("grub-common grub-pc-bin xorriso mtools"),
    },
    Manager {
        program: "dnf",
        commands: &["dnf install -y"],
        unattended: &[],
        qemu: "qemu-system-x86-core",
        valgrind: "valgrind",
        bochs: None,
        grub: None,
    },
    Manager {
        program: "pacman",
        commands: &["pacman -Sy --noconfirm"],
        unattended: &[],
        qemu: "qemu-system-x86",
        valgrind: "valgrind",
        bochs: None,
        grub: None,
    },
    Manager {
        program: "zypper",
        commands: &["zypper --non-interactive install"],
        unattended: &[],
        qemu: "qemu-x86",
        valgrind: "valgrind",
        bochs: None,
        grub: None,
    },
    Manager {
        program: "apk",
        commands: &["apk add"],
        unattended: &[],
        qemu: "qemu-system-x86_64",
        valgrind: "valgrind",
        bochs: None,
        grub: None,
    },
];

impl Manager {
    /// The packages of `tool`, if they are known.
    fn packages(&self, tool: Tool) -> Option<&'static str> {
        match tool {
            Tool::Qemu => Some(self.qemu),
            Tool::Valgrind => Some(self.valgrind),
            Tool::Bochs => self.bochs,
            Tool::Grub => self.grub,
        }
    }

    /// What installs `packages`, one command line each, run through `prefix`.
    fn lines(&self, packages: &str, prefix: &str) -> Vec<String> {
        let last = self.commands.len().saturating_sub(1);
        let with_package = |(position, command)| {
            if position == last {
                format!("{prefix}{command} {packages}")
            } else {
                format!("{prefix}{command}")
            }
        };
        self.commands.iter().enumerate().map(with_package).collect()
    }
}

/// Returns when `tool` can be run, installing it if it is missing.
///
/// # Errors
/// If it is missing and could not be installed: the message says what to run.
pub(crate) fn ensure(tool: Tool) -> Result<()> {
    let Some(missing) = tool.missing() else { return Ok(()) };
    let manager = MANAGERS.iter().find(|manager| on_path(manager.program));
    let Some((manager, packages)) =
        manager.and_then(|manager| Some((manager, manager.packages(tool)?)))
    else {
        bail!(
            "{missing} is missing and no package manager here is known to have it: install it by hand"
        );
    };
    let Some(prefix) = privilege() else {
        let lines = manager.lines(packages, "sudo ").join(" && ");
        bail!("{missing} is missing; install it with\n    {lines}\nand run this again");
    };
    let mut last = Ok(());
    for line in manager.lines(packages, prefix) {
        eprintln!("{missing} is missing, installing it: {line}");
        last = install(&line, manager.unattended)
            .with_context(|| format!("{missing} is missing and `{line}` failed"));
    }
    last?;
    if let Some(missing) = tool.missing() {
        bail!("{packages} were installed, but {missing} is still missing");
    }
    Ok(())
}

/// Whether a program is on the search path, or a file where its whole path says.
fn on_path(program: &str) -> bool {
    env::var_os("PATH")
        .is_some_and(|path| env::split_paths(&path).any(|folder| folder.join(program).is_file()))
}

/// How a command is run with the right to install: directly, through sudo, or not at all.
fn privilege() -> Option<&'static str> {
    let user = Command::new("id").arg("-u").output().ok()?;
    if user.stdout.trim_ascii() == b"0" {
        return Some("");
    }
    let may_sudo = checkout::command("sudo")
        .args(["-n", "true"])
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success());
    may_sudo.then_some("sudo -n ")
}

/// Runs one line; its chatter goes to standard error, since standard output may be a JSON object.
fn install(line: &str, unattended: &[&str]) -> Result<()> {
    let mut words = line.split_whitespace();
    let program = words.next().context("an empty command")?;
    let status = checkout::command(program)
        .args(words)
        .args(unattended)
        .env("DEBIAN_FRONTEND", "noninteractive")
        .stdout(io::stderr())
        .status()?;
    if !status.success() {
        bail!("it ended with {status}");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_manager_names_the_packages_last() {
        for manager in MANAGERS {
            for tool in [Tool::Qemu, Tool::Valgrind, Tool::Bochs, Tool::Grub] {
                let Some(packages) = manager.packages(tool) else { continue };
                let lines = manager.lines(packages, "sudo ");
                let last = lines.last().expect("at least one command");
                assert!(last.ends_with(&format!(" {packages}")), "{last}");
                assert!(lines.iter().all(|line| line.starts_with("sudo ")));
                assert!(lines.iter().all(|line| line.contains(manager.program)));
            }
        }
    }

    #[test]
    fn programs_are_looked_for_on_the_search_path() {
        assert!(on_path("cargo"));
        assert!(!on_path("no-such-program-anywhere"));
    }

    #[test]
    fn a_file_is_looked_for_by_its_whole_path() {
        let manifest = concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml");
        assert!(on_path(manifest));
        assert!(!on_path(&format!("{manifest}.missing")));
    }
}
