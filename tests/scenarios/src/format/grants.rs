//! Keys of steps about grants.

use serde::Deserialize;

use super::helpers::{back, front, one};
use crate::values::{Count, Names, OneOrMany};

/// `grant`: pages and grants of them.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Grant {
    /// The pages, by name; one that has a page already is granted as it is.
    pub pages: Names,
    /// Who grants.
    #[serde(default = "front")]
    pub by: String,
    /// To whom.
    #[serde(default = "back")]
    pub to: String,
    /// The first reference; the next free one if absent.
    pub reference: Option<u32>,
    /// Only reading is granted.
    #[serde(default)]
    pub read_only: bool,
}

/// `entry`: one entry of a version 1 table.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Entry {
    /// Whose table.
    #[serde(default = "front")]
    pub by: String,
    /// Which entry.
    pub reference: u32,
    /// Its flags.
    pub flags: u16,
    /// To whom.
    #[serde(default = "back")]
    pub to: String,
    /// The page.
    pub page: Option<String>,
}

/// `word`: one word of a table of either version.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Word {
    /// Whose table.
    #[serde(default = "front")]
    pub by: String,
    /// Of its entries, 8 bytes each, or of its status words, 2 bytes each.
    pub sort: Sort,
    /// Which, from 0.
    pub word: usize,
    /// The lower half of an entry's word, or the status word.
    pub low: u32,
    /// The upper half of an entry's word.
    #[serde(default)]
    pub high: u32,
}

/// What became of an attempt.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Attempt {
    /// It works.
    #[default]
    Ok,
    /// Somebody is still using it.
    Busy,
    /// It is refused.
    Refused,
    /// Either way.
    Any,
}

/// `end_access`.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EndAccess {
    /// Pages whose grants end.
    pub pages: Names,
    /// Whether it works.
    #[serde(default)]
    pub result: Attempt,
}

/// `take_back`.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TakeBack {
    /// Pages whose grants end, and which are freed.
    pub pages: Names,
    /// Whether it works.
    #[serde(default)]
    pub result: Attempt,
}

/// How a hypercall ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum End {
    /// With a status for each element.
    #[default]
    Done,
    /// It was left and wants to go on.
    Continue,
    /// With -EFAULT.
    Fault,
    /// With -EINVAL.
    Invalid,
    /// With -EBUSY.
    Busy,
    /// Any of them.
    Any,
}

/// What is expected of a hypercall or of an edit.
#[derive(Clone, Debug, Default)]
pub struct Ending {
    /// How it ends.
    pub outcome: End,
    /// The status of each element, or of all.
    pub status: Option<OneOrMany<i16>>,
    /// Requests to flush CPUs.
    pub tlb: Option<Count>,
    /// Requests to flush devices.
    pub iotlb: Option<Count>,
}

/// A change to one element of a call.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Alter {
    /// Which element, from 0.
    pub element: usize,
    /// Another reference.
    pub reference: Option<u32>,
    /// Another granter, by number.
    pub domain: Option<u16>,
    /// Other flags.
    pub flags: Option<u32>,
    /// Another handle.
    pub handle: Option<u32>,
    /// Another address, in bytes.
    pub address: Option<u64>,
    /// A device address, in bytes.
    pub device_address: Option<u64>,
    /// A new address, in bytes.
    pub new_address: Option<u64>,
}

/// `map`.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Map {
    /// Granted pages, by name.
    pub pages: Names,
    /// Who maps.
    #[serde(default = "back")]
    pub by: String,
    /// The frame number of the first.
    pub at: u64,
    /// From one frame number to the next.
    #[serde(default = "one")]
    pub stride: u64,
    /// Without the right to write.
    #[serde(default)]
    pub read_only: bool,
    /// Names of the mappings; those of the pages if absent.
    #[serde(rename = "as")]
    pub names: Option<Names>,
    /// Changes to elements.
    #[serde(default)]
    pub alter: Vec<Alter>,
    /// How it ends.
    #[serde(default)]
    pub outcome: End,
    /// The status of each, or of all; 0 if absent.
    pub status: Option<OneOrMany<i16>>,
    /// Requests to flush CPUs.
    pub tlb: Option<Count>,
    /// Requests to flush devices.
    pub iotlb: Option<Count>,
}

/// The two ways to give a mapping back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Giving {
    /// `unmap_grant_ref`.
    #[default]
    Unmap,
    /// `unmap_and_replace`.
    Replace,
}

/// In which order elements go into a call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Order {
    /// As they are named.
    #[default]
    Given,
    /// The last one first.
    Reversed,
    /// In no order, the same in each run.
    Shuffled,
}

/// `unmap`.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Unmap {
    /// Mappings, by name.
    pub mappings: Names,
    /// Who gives them back.
    #[serde(default = "back")]
    pub by: String,
    /// Which operation.
    #[serde(default)]
    pub operation: Giving,
    /// In which order.
    #[serde(default)]
    pub order: Order,
    /// Changes to elements.
    #[serde(default)]
    pub alter: Vec<Alter>,
    /// How it ends.
    #[serde(default)]
    pub outcome: End,
    /// The status of each, or of all; 0 if absent.
    pub status: Option<OneOrMany<i16>>,
    /// Requests to flush CPUs.
    pub tlb: Option<Count>,
    /// Requests to flush devices.
    pub iotlb: Option<Count>,
}

/// `copy`.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Copy {
    /// Granted pages, by name.
    pub pages: Names,
    /// Who copies.
    #[serde(default = "back")]
    pub by: String,
    /// The caller's own page for the first of them, by frame number; the next follow.
    pub at: u64,
    /// Into the granted pages, not out of them.
    #[serde(default)]
    pub write: bool,
    /// How it ends.
    #[serde(default)]
    pub outcome: End,
    /// The status of each, or of all; 0 if absent.
    pub status: Option<OneOrMany<i16>>,
    /// Requests to flush CPUs.
    pub tlb: Option<Count>,
    /// Requests to flush devices.
    pub iotlb: Option<Count>,
}

/// `go_on`.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GoOn {
    /// Whose call.
    #[serde(default = "back")]
    pub by: String,
    /// How it ends.
    #[serde(default)]
    pub outcome: End,
    /// The status of each element of the whole call, or of all.
    pub status: Option<OneOrMany<i16>>,
    /// Requests to flush CPUs.
    pub tlb: Option<Count>,
    /// Requests to flush devices.
    pub iotlb: Option<Count>,
}

/// `swap`.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Swap {
    /// Pages whose grants change places with those of `with`, by name.
    pub pages: Names,
    /// The others, one for each.
    pub with: Names,
    /// Whose table.
    #[serde(default = "front")]
    pub by: String,
    /// How it ends.
    #[serde(default)]
    pub outcome: End,
    /// The status of each, or of all; 0 if absent.
    pub status: Option<OneOrMany<i16>>,
}

/// `set_version`.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SetVersion {
    /// Whose table.
    #[serde(default = "front")]
    pub by: String,
    /// 1 or 2, or something that is neither.
    pub version: u32,
    /// How it ends.
    #[serde(default)]
    pub outcome: End,
    /// The version afterwards.
    pub then: Option<u32>,
}

/// The two sorts of frames of a grant table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Sort {
    /// With entries.
    Shared,
    /// With status words.
    Status,
}

/// `list_frames`.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ListFrames {
    /// Whose table.
    #[serde(default = "front")]
    pub by: String,
    /// Which frames.
    pub sort: Sort,
    /// How many are asked for.
    pub frames: u32,
    /// What it answers.
    #[serde(default)]
    pub status: i16,
    /// How many frame numbers are written into the list.
    pub written: u32,
}

/// `status_frame`.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StatusFrame {
    /// Whose table.
    #[serde(default = "front")]
    pub by: String,
    /// Which frame.
    pub frame: usize,
    /// It is mapped from now on, or it is not.
    pub mapped: bool,
    /// Whether there is such a frame.
    #[serde(default)]
    pub result: Attempt,
}
