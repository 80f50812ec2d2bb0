//! Keys of steps of hardware.

use serde::Deserialize;

use super::{Attempt, helpers::back};
use crate::values::{Names, OneOrMany};

/// What an access wants.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum AccessKind {
    /// To write.
    #[default]
    Write,
    /// To read.
    Read,
}

/// `access`.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Access {
    /// CPUs (`cpu1`) and devices (`dev0`).
    pub by: Names,
    /// Mappings or pages of a domain's own, by name.
    pub mappings: Option<Names>,
    /// Frame numbers.
    pub at: Option<OneOrMany<u64>>,
    /// What it wants.
    #[serde(default)]
    pub kind: AccessKind,
    /// `same` (each its own page), `fault`, `any`, or the name of a page, for all or for each.
    pub reaches: OneOrMany<String>,
}

/// `speculate`.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Speculate {}

/// `dma_begin`.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DmaBegin {
    /// The device.
    pub by: String,
    /// Mappings, by name.
    pub mappings: Names,
    /// What it does.
    #[serde(default)]
    pub kind: AccessKind,
}

/// `dma_finish`.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DmaFinish {}

/// `attach`.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Attach {
    /// The device.
    pub device: String,
    /// To whom.
    pub to: String,
    /// Whether it works.
    #[serde(default)]
    pub result: Attempt,
}

/// `detach`.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Detach {
    /// The device.
    pub device: String,
    /// From whom.
    #[serde(default = "back")]
    pub from: String,
    /// Whether it works.
    #[serde(default)]
    pub result: Attempt,
}

/// `reattach`.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Reattach {
    /// The device.
    pub device: String,
    /// From whom.
    #[serde(default = "back")]
    pub from: String,
    /// To whom.
    pub to: String,
    /// Whether it works.
    #[serde(default)]
    pub result: Attempt,
}

/// `unplug`.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Unplug {
    /// The device.
    pub device: String,
}

/// `declare_gone`.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeclareGone {
    /// The device.
    pub device: String,
}

/// `enter`.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Enter {
    /// Which CPU: 1 to 3.
    pub cpu: usize,
    /// Which vCPU of the domain; the one with the CPU's number if absent.
    pub vcpu: Option<usize>,
    /// Which domain.
    #[serde(default = "back")]
    pub domain: String,
}

/// `leave`.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Leave {
    /// Which CPU.
    pub cpu: usize,
}

/// How hardware fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum How {
    /// It never answers.
    Hang,
    /// The queue stops with an error (IQE).
    QueueError,
    /// The queue stops with a time-out (ITE).
    TimeOut,
    /// A completion error (ICE).
    CompletionError,
}

/// `fail`.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fail {
    /// Which operations from now on, from 1.
    pub operation: OneOrMany<u64>,
    /// How.
    pub how: How,
}

/// `repair`.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Repair {}
