//! Values of a scenario file that can be written in more than one way.
//!
//! [`Names`] is a list in which `a[0..32]` stands for 32 names; a [`Count`] is a number or
//! bounds; [`OneOrMany`] is a value for all elements or one for each.

use std::{fmt, marker::PhantomData};

use serde::{
    Deserialize, Deserializer,
    de::{self, MapAccess, SeqAccess, Visitor, value::MapAccessDeserializer},
};

/// Names, spelt out.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Names(pub Vec<String>);

/// More than this many names in one list are a slip of the pen.
const MOST: usize = 20_000;

impl Names {
    /// Adds what `text` stands for.
    fn add(&mut self, text: &str) -> Result<(), String> {
        let Some((stem, rest)) = text.split_once('[') else {
            is_name(text)?;
            self.0.push(text.to_owned());
            return Ok(());
        };
        is_name(stem)?;
        let bounds = rest.strip_suffix(']').and_then(|range| range.split_once(".."));
        let (first, end) = bounds
            .and_then(|(first, end)| Some((first.parse().ok()?, end.parse().ok()?)))
            .ok_or_else(|| format!("`{text}` is no list of names; expected such as `a[0..32]`"))?;
        let range: std::ops::Range<usize> = first..end;
        if range.is_empty() || range.len() > MOST {
            return Err(format!("`{text}` stands for {} names, not 1 to {MOST}", range.len()));
        }
        self.0.extend(range.map(|number| format!("{stem}{number}")));
        Ok(())
    }
}

fn is_name(text: &str) -> Result<(), String> {
    let letters = |letter: char| letter.is_ascii_alphanumeric() || letter == '-' || letter == '_';
    if text.starts_with(|first: char| first.is_ascii_alphabetic()) && text.chars().all(letters) {
        Ok(())
    } else {
        Err(format!("`{text}` is no name; expected a letter, then letters, digits, `-` or `_`"))
    }
}

struct NamesVisitor;

impl<'de> Visitor<'de> for NamesVisitor {
    type Value = Names;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a name, a range of names such as \"a[0..32]\", or a list of them")
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<Names, E> {
        let mut names = Names::default();
        names.add(text).map_err(E::custom)?;
        Ok(names)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Names, A::Error> {
        let mut names = Names::default();
        while let Some(text) = list.next_element::<String>()? {
            names.add(&text).map_err(de::Error::custom)?;
        }
        Ok(names)
    }
}

impl<'de> Deserialize<'de> for Names {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(NamesVisitor)
    }
}

/// How often something may happen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Count {
    /// At least so often.
    pub min: u64,
    /// At most so often.
    pub max: u64,
}

impl Count {
    /// Whether `number` is within the bounds.
    #[must_use]
    pub const fn allows(self, number: u64) -> bool {
        self.min <= number && number <= self.max
    }
}

impl fmt::Display for Count {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.min, self.max) {
            (min, max) if min == max => write!(f, "{min}"),
            (min, u64::MAX) => write!(f, "at least {min}"),
            (0, max) => write!(f, "at most {max}"),
            (min, max) => write!(f, "{min} to {max}"),
        }
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Bounds {
    min: Option<u64>,
    max: Option<u64>,
}

struct CountVisitor;

impl<'de> Visitor<'de> for CountVisitor {
    type Value = Count;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a number, or bounds such as { min = 1, max = 2 }")
    }

    fn visit_i64<E: de::Error>(self, number: i64) -> Result<Count, E> {
        let number = u64::try_from(number).map_err(|_| E::custom("a count is not negative"))?;
        Ok(Count { min: number, max: number })
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Count, A::Error> {
        let Bounds { min, max } = Bounds::deserialize(MapAccessDeserializer::new(map))?;
        let count = Count { min: min.unwrap_or(0), max: max.unwrap_or(u64::MAX) };
        if count.min > count.max {
            return Err(de::Error::custom("min is more than max"));
        }
        Ok(count)
    }
}

impl<'de> Deserialize<'de> for Count {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(CountVisitor)
    }
}

/// One value for all, or one for each.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OneOrMany<T> {
    /// For all.
    One(T),
    /// In order.
    Many(Vec<T>),
}

impl<T> OneOrMany<T> {
    /// The value for the element at `place`.
    pub fn at(&self, place: usize) -> Option<&T> {
        match self {
            Self::One(value) => Some(value),
            Self::Many(values) => values.get(place),
        }
    }

    /// How many values are written down, where there is one for each.
    pub fn many(&self) -> Option<usize> {
        match self {
            Self::One(_) => None,
            Self::Many(values) => Some(values.len()),
        }
    }
}

struct Either<T>(PhantomData<T>);

impl<'de, T: Deserialize<'de>> Visitor<'de> for Either<T> {
    type Value = OneOrMany<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value for all, or a list with one for each")
    }

    fn visit_i64<E: de::Error>(self, number: i64) -> Result<Self::Value, E> {
        T::deserialize(de::value::I64Deserializer::new(number)).map(OneOrMany::One)
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<Self::Value, E> {
        T::deserialize(de::value::StrDeserializer::new(text)).map(OneOrMany::One)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Self::Value, A::Error> {
        let mut values = Vec::new();
        while let Some(value) = list.next_element()? {
            values.push(value);
        }
        Ok(OneOrMany::Many(values))
    }
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for OneOrMany<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Either(PhantomData))
    }
}
