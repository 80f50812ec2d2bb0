//! What a scenario file may say, key by key.
//!
//! A [`Scenario`] is a file as it was read: the machine, then [`Step`]s, each of which is
//! one [action](Action) with what is expected of it. `docs/scenarios.md` is the reference.
//! Keys that are not listed here are refused.

use serde::Deserialize;
use toml::Spanned;

mod grants;
mod hardware;
mod helpers;
mod memory;
mod other;

pub use grants::*;
pub use hardware::*;
pub use memory::*;
pub use other::*;

/// A scenario file.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Scenario {
    /// What it shows, in one line.
    pub title: String,
    /// The public report it follows, such as `B02`.
    pub bug: Option<String>,
    /// Kinds of fault it is about, such as `F02`.
    #[serde(default)]
    pub kinds: Vec<String>,
    /// Where the report can be read.
    pub source: Option<String>,
    /// Why it is worth running, in a few sentences.
    pub about: Option<String>,
    /// The most flushes it may take.
    pub bound: Spanned<Bound>,
    /// The machine.
    #[serde(default)]
    pub machine: Machine,
    /// Its remapping units.
    #[serde(default)]
    pub unit: Unit,
    /// Domains beside `front` and `back`.
    #[serde(default)]
    pub domain: Vec<Spanned<NewDomain>>,
    /// Devices beside the first one of each unit.
    #[serde(default)]
    pub device: Vec<Spanned<NewDevice>>,
    /// How actors are interleaved.
    #[serde(default)]
    pub interleave: Interleave,
    /// What happens.
    #[serde(default)]
    pub step: Vec<Spanned<Step>>,
}

/// The most flushes a scenario may take: "flush always" is no answer.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Bound {
    /// Requests to flush CPUs, in all calls together.
    pub tlb: u64,
    /// Requests to flush devices.
    pub iotlb: u64,
    /// IOTLB commands that units carry out.
    pub commands: Option<u64>,
}

/// Whose tables devices walk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Tables {
    /// Run once with each of the two.
    #[default]
    Both,
    /// Devices have tables of their own.
    Separate,
    /// Devices walk the CPUs' tables.
    Shared,
}

/// What CPUs walk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Cpus {
    /// EPT, or NPT if whoever runs the file says so.
    #[default]
    Any,
    /// EPT.
    Ept,
    /// NPT, with an ASID for each vCPU.
    Npt,
}

/// The machine.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Machine {
    /// Whose tables devices walk.
    pub tables: Tables,
    /// What CPUs walk.
    pub cpus: Cpus,
    /// CPUs mark what they use, and what they never used is cleared for nothing.
    pub accessed: bool,
    /// ASIDs of each CPU, the host's among them: 8 if absent.
    pub asids: Option<u32>,
    /// CPUs can flush a single ASID: they can if absent.
    pub flush_by_asid: Option<bool>,
    /// Levels of the devices' own tables: 3, 4 or 5.
    pub levels: u8,
    /// Frames of memory.
    pub frames: u64,
    /// Devices have TLBs of their own and use them.
    pub device_tlb: bool,
    /// Units are driven through their registers, not their queue.
    pub registers: bool,
    /// Pages of handles each domain may have, of 256 handles.
    pub handle_pages: usize,
}

impl Default for Machine {
    fn default() -> Self {
        Self {
            tables: Tables::Both,
            cpus: Cpus::Any,
            accessed: false,
            asids: None,
            flush_by_asid: None,
            levels: 4,
            frames: 4096,
            device_tlb: false,
            registers: false,
            handle_pages: 1024,
        }
    }
}

/// The remapping units.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Unit {
    /// How many there are, all alike.
    pub count: usize,
    /// They can forget single blocks of pages.
    pub page_selective: bool,
    /// The largest such block, as a power of two of pages.
    pub max_address_mask: u8,
    /// They may remember that nothing is mapped.
    pub caching_mode: bool,
    /// They see stores in the processors' caches.
    pub coherent: bool,
    /// They see stores to their tables only once a buffer was flushed.
    pub write_buffer: bool,
    /// Commands have to ask for writes on their way to be waited for; else each waits.
    pub drain_writes: bool,
    /// The same for reads.
    pub drain_reads: bool,
    /// Large leaves of 2 MiB exist.
    pub large_leaves: bool,
    /// Bits of a domain id that they tell apart.
    pub domain_id_bits: u8,
    /// Width of device addresses.
    pub address_bits: u8,
    /// Ticks from fetching a command to carrying it out.
    pub latency: u32,
    /// Fault records.
    pub fault_records: u16,
    /// Pages of the queue, of 256 commands each, as a power of two.
    pub ring: u8,
}

impl Default for Unit {
    fn default() -> Self {
        Self {
            count: 1,
            page_selective: true,
            max_address_mask: 18,
            caching_mode: false,
            coherent: true,
            write_buffer: false,
            drain_writes: true,
            drain_reads: true,
            large_leaves: true,
            domain_id_bits: 16,
            address_bits: 48,
            latency: 2,
            fault_records: 1,
            ring: 0,
        }
    }
}

/// A further domain.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NewDomain {
    /// Its name.
    pub name: String,
}

/// A further device, which belongs to nobody at first.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NewDevice {
    /// Its name.
    pub name: String,
    /// The unit it is behind.
    #[serde(default)]
    pub unit: usize,
    /// Its source id.
    pub source: u16,
    /// It has a TLB of its own.
    #[serde(default)]
    pub device_tlb: bool,
}

/// How many orders of the actors' steps are run.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Interleave {
    /// All orders, up to this many.
    pub limit: u64,
    /// Where that was not all: this many more at random.
    pub random: u64,
    /// Actors also take turns inside calls, wherever the library calls its embedder.
    pub inside: bool,
}

impl Default for Interleave {
    fn default() -> Self {
        Self { limit: 800, random: 100, inside: true }
    }
}

macro_rules! actions {
    ($($(#[$meta:meta])* $key:ident: $name:ident,)*) => {
        /// One step: exactly one action, and perhaps who does it.
        #[derive(Clone, Debug, Default, Deserialize)]
        #[serde(deny_unknown_fields)]
        pub struct Step {
            /// Steps of different actors that follow each other are interleaved.
            pub actor: Option<String>,
            /// Why, for whoever reads the file.
            pub note: Option<String>,
            $($(#[$meta])* pub $key: Option<$name>,)*
        }

        /// What a step does.
        #[derive(Clone, Debug)]
        pub enum Action {
            $($(#[$meta])* $name(Box<$name>),)*
        }

        /// The names of all actions.
        pub const ACTIONS: &[&str] = &[$(stringify!($key)),*];

        impl Step {
            /// The actions it names: there should be one.
            pub fn actions(&self) -> Vec<Action> {
                let mut actions = Vec::new();
                $(actions.extend(self.$key.clone().map(|action| Action::$name(Box::new(action))));)*
                actions
            }
        }

        impl Action {
            /// Its key in a file.
            #[must_use]
            pub fn name(&self) -> &'static str {
                match self { $(Self::$name(_) => stringify!($key),)* }
            }
        }
    };
}

actions! {
    /// A domain gives itself pages and grants them.
    grant: Grant,
    /// A domain writes an entry of its grant table, word for word.
    entry: Entry,
    /// A domain writes one word of its grant table, whatever it means.
    word: Word,
    /// A domain ends grants, if they are not in use.
    end_access: EndAccess,
    /// A domain ends grants and frees the pages.
    take_back: TakeBack,
    /// A domain maps grants in one hypercall.
    map: Map,
    /// A domain gives mappings back in one hypercall.
    unmap: Unmap,
    /// A domain copies between granted pages and its own memory in one hypercall.
    copy: Copy,
    /// A call that was left goes on.
    go_on: GoOn,
    /// A domain lets entries of its grant table change places in one hypercall.
    swap: Swap,
    /// A domain chooses the version of its grant table.
    set_version: SetVersion,
    /// A domain asks for the frames of its grant table.
    list_frames: ListFrames,
    /// A domain maps or unmaps a status frame of its grant table.
    status_frame: StatusFrame,
    /// A domain gets memory of its own.
    populate: Populate,
    /// A range of a domain's memory is cleared and freed, with its tables.
    clear: Clear,
    /// Rights are taken from a range of a domain's memory.
    restrict: Restrict,
    /// A page of a domain's memory is replaced by another.
    swap_page: SwapPage,
    /// A page of a domain's memory moves to another number.
    move_page: MovePage,
    /// Somebody takes freed frames and writes to them.
    reuse: Reuse,
    /// CPUs and devices access memory.
    access: Access,
    /// Hardware caches whatever it can reach.
    speculate: Speculate,
    /// A device begins an access.
    dma_begin: DmaBegin,
    /// A device finishes what it began.
    dma_finish: DmaFinish,
    /// A device is given to a domain.
    attach: Attach,
    /// A device is taken from a domain.
    detach: Detach,
    /// A device goes from one domain to another.
    reattach: Reattach,
    /// A device is unplugged.
    unplug: Unplug,
    /// The hypervisor learns that a device is gone.
    declare_gone: DeclareGone,
    /// A CPU runs a domain.
    enter: Enter,
    /// A CPU leaves the domain it runs.
    leave: Leave,
    /// A hardware operation to come fails.
    fail: Fail,
    /// Hardware works again.
    repair: Repair,
    /// What goes wrong in the calls to come.
    faults: Faults,
    /// Memory is used up but for a few frames, or given back.
    memory: Memory,
    /// Flushes that failed are tried again.
    retry: Retry,
    /// A domain is destroyed.
    destroy: Destroy,
    /// From here on commands are counted afresh.
    mark: Mark,
    /// What must hold.
    check: Check,
    /// A generated workload.
    workload: Workload,
}
