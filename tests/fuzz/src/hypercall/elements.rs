//! What hostile guests put into their calls: elements, pointers, counts, trouble.
//!
//! Most of it is such that it means something. [`Mostly`] says what is usual and what
//! comes now and then, so that a call gets far and still meets everything.

use arbitrary::{Arbitrary, Unstructured};
use gnttab::{Action, abi::CopyPlace};

use super::{ARGUMENT_PAGES, BASE, PAGES, WINDOW, ram};
use crate::{
    script::Below,
    world::{Fails, Who},
};

/// A few elements, or as many as need several flushes.
#[derive(Debug)]
pub(super) struct Many<T>(pub(super) Vec<T>);

impl<'a, T: Arbitrary<'a>> Arbitrary<'a> for Many<T> {
    fn arbitrary(bytes: &mut Unstructured<'a>) -> arbitrary::Result<Self> {
        // Bytes that have run out are zeros: those have to stand for what is plain.
        let most = if bytes.ratio(3, 4)? { 6 } else { 75 };
        let count = bytes.int_in_range(1..=most)?;
        (0..count).map(|_| T::arbitrary(bytes)).collect::<Result<_, _>>().map(Self)
    }
}

/// What a guest puts into its memory in one go.
#[derive(Debug)]
pub(super) struct Piece<'a>(pub(super) &'a [u8]);

impl<'a> Arbitrary<'a> for Piece<'a> {
    fn arbitrary(bytes: &mut Unstructured<'a>) -> arbitrary::Result<Self> {
        let length = bytes.int_in_range(0..=100)?;
        bytes.bytes(length.min(bytes.len())).map(Self)
    }
}

/// Mostly the first, now and then anything.
#[derive(Debug)]
pub(super) enum Mostly<T, U> {
    Usual(T),
    Rare(U),
}

impl<'a, T: Arbitrary<'a>, U: Arbitrary<'a>> Arbitrary<'a> for Mostly<T, U> {
    fn arbitrary(bytes: &mut Unstructured<'a>) -> arbitrary::Result<Self> {
        match bytes.ratio(23, 24)? {
            true => T::arbitrary(bytes).map(Self::Usual),
            false => U::arbitrary(bytes).map(Self::Rare),
        }
    }
}

#[derive(Debug, Arbitrary)]
pub(super) struct Map {
    pub(super) at: Place,
    pub(super) read_only: bool,
    pub(super) flags: Mostly<(), u32>,
    pub(super) reference: Mostly<Below<PAGES>, u32>,
    pub(super) granter: Mostly<Granter, u16>,
}

#[derive(Debug, Arbitrary)]
pub(super) enum Granter {
    Other,
    AlsoOther,
    Own,
}

#[derive(Debug, Arbitrary)]
pub(super) struct Unmap {
    /// One of the mappings that the guest was told of.
    pub(super) mapping: Mostly<u8, u32>,
    /// Somewhere else than where it was mapped.
    pub(super) at: Mostly<(), Place>,
    pub(super) new_addr: Mostly<(), u64>,
}

#[derive(Debug, Arbitrary)]
pub(super) struct Copy {
    pub(super) from: Side,
    pub(super) to: Side,
    pub(super) length: Mostly<Below<4097>, u16>,
    pub(super) flags: Mostly<(), u16>,
}

/// One side of a copy.
#[derive(Debug, Arbitrary)]
pub(super) struct Side {
    pub(super) granted: bool,
    pub(super) reference: Below<PAGES>,
    pub(super) at: Place,
    pub(super) offset: Mostly<Below<64>, u16>,
    pub(super) granter: Mostly<Granter, u16>,
}

impl Side {
    pub(super) fn place(&self, by: Who) -> CopyPlace {
        let domain = match self.granter {
            Mostly::Usual(_) if !self.granted => by.id().get(),
            Mostly::Usual(Granter::Other | Granter::AlsoOther) => by.other().id().get(),
            Mostly::Usual(Granter::Own) => by.id().get(),
            Mostly::Rare(id) => id,
        };
        let frame = if self.granted { self.reference.0 } else { self.at.address() >> 12 };
        let offset = match self.offset {
            Mostly::Usual(offset) => offset.0 as u16,
            Mostly::Rare(offset) => offset,
        };
        CopyPlace { frame, domain, offset, padding: 0 }
    }
}

#[derive(Debug, Arbitrary)]
pub(super) enum Place {
    Window(Below<40>),
    Ram(Below<PAGES>),
    Rare(Mostly<Below<40>, Far>),
}

#[derive(Debug, Arbitrary)]
pub(super) enum Far {
    Zero,
    /// Where arguments are: they may move under the call's hands.
    Arguments(Below<ARGUMENT_PAGES>),
    Last,
    Beyond,
    Any(u64),
}

impl Place {
    /// A byte address.
    pub(super) fn address(&self) -> u64 {
        let window = |place: &Below<40>| (WINDOW + place.0) << 12;
        match self {
            Self::Window(place) | Self::Rare(Mostly::Usual(place)) => window(place),
            Self::Ram(page) => ram(page.0).get() << 12,
            Self::Rare(Mostly::Rare(far)) => match far {
                Far::Zero => 0,
                Far::Arguments(page) => BASE + (page.0 << 12),
                Far::Last => (1 << 48) - 1,
                Far::Beyond => 1 << 48,
                Far::Any(address) => *address,
            },
        }
    }
}

#[derive(Debug, Arbitrary)]
pub(super) enum Command {
    Offered(Below<13>),
    Any(u32),
}

#[derive(Debug, Arbitrary)]
pub(super) enum Pointer {
    Arguments(u16),
    Edge(Below<64>),
    End(Below<64>),
    Any(u64),
}

#[derive(Debug, Arbitrary)]
pub(super) enum Count {
    One,
    Few(Below<80>),
    Any(u32),
}

/// What goes wrong during a step.
#[derive(Debug)]
pub(super) enum Trouble {
    None,
    Read(u8),
    Write(u8),
    Preempt,
    Denied(Action),
    Hardware(u8, Fails),
}

impl<'a> Arbitrary<'a> for Trouble {
    fn arbitrary(bytes: &mut Unstructured<'a>) -> arbitrary::Result<Self> {
        Ok(match bytes.int_in_range(0..=15_u8)? {
            1 => Self::Read(bytes.arbitrary()?),
            2 => Self::Write(bytes.arbitrary()?),
            3 => Self::Preempt,
            4 => Self::Denied(*bytes.choose(&[
                Action::Map,
                Action::Unmap,
                Action::Setup,
                Action::Copy,
            ])?),
            5 | 6 => Self::Hardware(bytes.arbitrary()?, bytes.arbitrary()?),
            _ => Self::None,
        })
    }
}
