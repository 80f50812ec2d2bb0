//! Keys of steps about a domain's own memory.

use serde::Deserialize;

use super::{Attempt, helpers::back};
use crate::values::{Count, Names};

/// `populate`.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Populate {
    /// New pages, by name.
    pub pages: Names,
    /// Whose memory.
    #[serde(default = "back")]
    pub by: String,
    /// The frame number of the first.
    pub at: u64,
    /// From one to the next; the size of a page if absent.
    pub stride: Option<u64>,
    /// The size of each, as a power of two: 0 or 9.
    #[serde(default)]
    pub order: u8,
    /// Whether it works.
    #[serde(default)]
    pub result: Attempt,
    /// Requests to flush CPUs.
    pub tlb: Option<Count>,
    /// Requests to flush devices.
    pub iotlb: Option<Count>,
}

/// `clear`.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Clear {
    /// Whose memory.
    #[serde(default = "back")]
    pub by: String,
    /// The first frame number.
    pub first: u64,
    /// How many.
    pub count: u64,
    /// Entries read before it pauses and what it took is flushed; 0 is no pause.
    #[serde(default)]
    pub budget: u64,
    /// In how many steps it is done, each with its flush.
    pub steps: Option<Count>,
    /// Whether it works.
    #[serde(default)]
    pub result: Attempt,
    /// Requests to flush CPUs.
    pub tlb: Option<Count>,
    /// Requests to flush devices.
    pub iotlb: Option<Count>,
}

/// Rights that are left.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Allowed {
    /// To read.
    Read,
    /// To read and to write, not to execute.
    ReadWrite,
}

/// `restrict`.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Restrict {
    /// Whose memory.
    #[serde(default = "back")]
    pub by: String,
    /// The first frame number.
    pub first: u64,
    /// How many.
    pub count: u64,
    /// What is still allowed.
    pub allow: Allowed,
    /// Entries read before it pauses and what it took is flushed; 0 is no pause.
    #[serde(default)]
    pub budget: u64,
    /// In how many steps it is done, each with its flush.
    pub steps: Option<Count>,
    /// Requests to flush CPUs.
    pub tlb: Option<Count>,
    /// Requests to flush devices.
    pub iotlb: Option<Count>,
}

/// `swap_page`.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SwapPage {
    /// Whose memory.
    #[serde(default = "back")]
    pub by: String,
    /// The frame number.
    pub at: u64,
    /// The new page, by name.
    pub page: String,
    /// Requests to flush CPUs.
    pub tlb: Option<Count>,
    /// Requests to flush devices.
    pub iotlb: Option<Count>,
}

/// `move_page`.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MovePage {
    /// Whose memory.
    #[serde(default = "back")]
    pub by: String,
    /// From this frame number.
    pub from: u64,
    /// To this one.
    pub to: u64,
    /// Requests to flush CPUs.
    pub tlb: Option<Count>,
    /// Requests to flush devices.
    pub iotlb: Option<Count>,
}

/// `reuse`.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Reuse {
    /// How many frames, those freed last first.
    pub frames: u64,
    /// Every word of them becomes a table entry for this page.
    pub forge: Option<String>,
}

/// `memory`.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Memory {
    /// So many frames are left; absent gives all of them back.
    pub left: Option<usize>,
}
