//! What a scenario begins with: the machine of its file, and a planted bug.

use stage2::format::vtd::VtdLevels;
use testbed::audit::Lie;
use testbed::command_line::CommandLine;
use testbed::fail;
use testbed::failure::{Context, Failure};

use crate::embedding::{Layout, Shape};
use crate::machine::Machine;
use crate::planted::{self, Property, UnitLie};
use crate::world::{Slip, World};

/// A planted bug: at most one of these is not as it should be.
#[derive(Clone, Copy, Debug)]
pub(super) struct Plant {
    /// What flushes of processors claim falsely.
    pub(super) cpus: Lie,
    /// What flushes of devices claim falsely.
    pub(super) devices: Lie,
    /// What the embedding does wrong in hypercalls.
    pub(super) slip: Option<Slip>,
    /// What the unit does wrong.
    pub(super) unit: UnitLie,
    /// Processors that run a guest are not in its books.
    pub(super) unseen: bool,
}

impl Plant {
    const NONE: Self = Self {
        cpus: Lie::None,
        devices: Lie::None,
        slip: None,
        unit: UnitLie::None,
        unseen: false,
    };

    /// The planted bug of this name.
    ///
    /// # Errors
    /// If there is none.
    pub(super) fn named(name: &str) -> Result<Self, Failure> {
        let slip = |slip| Self { slip: Some(slip), ..Self::NONE };
        let unit = |unit| Self { unit, ..Self::NONE };
        Ok(match name {
            "none" => Self::NONE,
            "skip-tlb" => Self { cpus: Lie::Skipped, ..Self::NONE },
            "skip-iotlb" => Self { devices: Lie::Skipped, ..Self::NONE },
            "unseen-cpu" => Self { unseen: true, ..Self::NONE },
            "lost-write" => slip(Slip::LostWrite),
            "uncounted" => slip(Slip::Uncounted),
            "entry-kept" => slip(Slip::EntryKept),
            "early-drop" => slip(Slip::EarlyDrop),
            "flush-twice" => slip(Slip::Twice),
            "no-preemption" => slip(Slip::NoPreemption),
            "ignore-iotlb" => unit(UnitLie::IgnoreIotlb),
            "ignore-context" => unit(UnitLie::IgnoreContext),
            "wrong-domain" => unit(UnitLie::WrongDomain),
            "smaller-mask" => unit(UnitLie::SmallerMask),
            other => fail!("plant={other} is no planted bug of this image"),
        })
    }
}

/// Properties of a unit, by the words that set them.
const PROPERTIES: [(&str, Property); 8] = [
    ("max_address_mask", Property::MaxAddressMask),
    ("page_selective", Property::PageSelective),
    ("domain_id_bits", Property::DomainIdBits),
    ("address_bits", Property::AddressBits),
    ("large_leaves", Property::LargeLeaves),
    ("write_buffer", Property::WriteBuffer),
    ("drain_writes", Property::DrainWrites),
    ("drain_reads", Property::DrainReads),
];

/// Brings the world up as `words` say.
///
/// # Errors
/// If they say what cannot be, or it does not come up.
pub(super) fn world(
    machine: &Machine,
    words: &CommandLine<'_>,
    plant: Plant,
) -> Result<World, Failure> {
    for (word, property) in PROPERTIES {
        if let Some(value) = number(words, word)? {
            planted::show(property, value);
        }
    }
    planted::lie(plant.unit);
    let layout = match words.get("tables") {
        None | Some("separate") => Layout::Separate,
        Some("shared") => Layout::Shared,
        Some(other) => fail!("tables={other} is neither separate nor shared"),
    };
    let mut shape = Shape::of(layout);
    match number(words, "levels")? {
        None | Some(4) => {}
        Some(3) => shape.device_levels = VtdLevels::Three,
        Some(other) => fail!("levels={other} is neither 3 nor 4"),
    }
    if let Some(pages) = number(words, "handle_pages")? {
        shape.handle_pages = usize::try_from(pages).context("handle_pages")?;
    }
    World::shaped(machine, shape)
}

fn number(words: &CommandLine<'_>, word: &str) -> Result<Option<u64>, Failure> {
    words.get(word).map(str::parse).transpose().context("a decimal number on the command line")
}
