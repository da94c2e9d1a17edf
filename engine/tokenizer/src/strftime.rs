//! `strftime` in UTC, for templates that write today's date.
//!
//! Only what Python prints in the C locale, from a given instant: the clock is never
//! read here.

/// Formats Unix seconds. `Err` holds the directive that is not known.
pub(crate) fn strftime(format: &str, unix_seconds: i64) -> Result<String, char> {
    let time = Civil::from_unix(unix_seconds);
    let mut out = String::with_capacity(format.len() + 16);
    let mut rest = format.chars();
    while let Some(c) = rest.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let mut directive = rest.next();
        let unpadded = directive == Some('-');
        if unpadded {
            directive = rest.next();
        }
        // What `-` does to the others depends on the C library.
        if let Some(other) = directive.filter(|c| unpadded && "fFTXRDxcZz".contains(*c)) {
            return Err(other);
        }
        let mut number = |value: i64, width: usize| {
            let width = if unpadded { 0 } else { width };
            out.push_str(&format!("{value:0width$}"));
        };
        match directive {
            Some('Y') => number(time.year, 4),
            Some('y') => number(time.year.rem_euclid(100), 2),
            Some('m') => number(time.month, 2),
            Some('d') => number(time.day, 2),
            Some('H') => number(time.hour, 2),
            Some('I') => number((time.hour + 11) % 12 + 1, 2),
            Some('M') => number(time.minute, 2),
            Some('S') => number(time.second, 2),
            Some('j') => number(time.day_of_year, 3),
            Some('w') => number(time.weekday, 1),
            Some('s') => number(unix_seconds, 1),
            Some('f') => out.push_str("000000"),
            Some('e') if unpadded => number(time.day, 0),
            Some('e') => out.push_str(&format!("{:>2}", time.day)),
            Some('p') => out.push_str(if time.hour < 12 { "AM" } else { "PM" }),
            Some('B') => out.push_str(MONTHS[time.month as usize - 1]),
            Some('b' | 'h') => out.push_str(&MONTHS[time.month as usize - 1][..3]),
            Some('A') => out.push_str(DAYS[time.weekday as usize]),
            Some('a') => out.push_str(&DAYS[time.weekday as usize][..3]),
            Some('F') => out.push_str(&strftime("%Y-%m-%d", unix_seconds)?),
            Some('T' | 'X') => out.push_str(&strftime("%H:%M:%S", unix_seconds)?),
            Some('R') => out.push_str(&strftime("%H:%M", unix_seconds)?),
            Some('D' | 'x') => out.push_str(&strftime("%m/%d/%y", unix_seconds)?),
            Some('c') => out.push_str(&strftime("%a %b %e %H:%M:%S %Y", unix_seconds)?),
            // A naive datetime prints nothing for these.
            Some('Z' | 'z') => {}
            Some('%') => out.push('%'),
            Some(other) => return Err(other),
            None => return Err('%'),
        }
    }
    Ok(out)
}

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const DAYS: [&str; 7] = [
    "Sunday",
    "Monday",
    "Tuesday",
    "Wednesday",
    "Thursday",
    "Friday",
    "Saturday",
];
const DAYS_BEFORE_MONTH: [i64; 12] = [0, 31, 59, 90, 120, 151, 181, 212, 243, 273, 304, 334];

/// A date and time of the Gregorian calendar. `month` and `day` from 1; Sunday is 0.
struct Civil {
    year: i64,
    month: i64,
    day: i64,
    hour: i64,
    minute: i64,
    second: i64,
    weekday: i64,
    day_of_year: i64,
}

impl Civil {
    /// *Source*: H. Hinnant, "chrono-Compatible Low-Level Date Algorithms", `civil_from_days`.
    fn from_unix(seconds: i64) -> Self {
        // The years 1 to 9999, as in Python; other instants are clamped.
        let seconds = seconds.clamp(-62_135_596_800, 253_402_300_799);
        let days = seconds.div_euclid(86_400);
        let of_day = seconds.rem_euclid(86_400);
        let shifted = days + 719_468;
        let era = shifted.div_euclid(146_097);
        let day_of_era = shifted.rem_euclid(146_097);
        let year_of_era =
            (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
        let day_from_march = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
        let month_from_march = (5 * day_from_march + 2) / 153;
        let day = day_from_march - (153 * month_from_march + 2) / 5 + 1;
        let month = (month_from_march + 2) % 12 + 1;
        let year = year_of_era + era * 400 + i64::from(month <= 2);
        let leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
        Self {
            year,
            month,
            day,
            hour: of_day / 3_600,
            minute: of_day / 60 % 60,
            second: of_day % 60,
            weekday: (days + 4).rem_euclid(7),
            day_of_year: DAYS_BEFORE_MONTH[month as usize - 1] + day + i64::from(leap && month > 2),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_known_instants() {
        let check = |format, seconds, expect: &str| {
            assert_eq!(strftime(format, seconds).as_deref(), Ok(expect));
        };
        check("%d %b %Y", 0, "01 Jan 1970");
        check(
            "%A, %B %-d, %Y %I:%M %p",
            951_825_600,
            "Tuesday, February 29, 2000 12:00 PM",
        );
        check(
            "%Y-%m-%dT%H:%M:%S %j",
            1_735_689_599,
            "2024-12-31T23:59:59 366",
        );
        check("%a %y%%", -1, "Wed 69%");
        check("%e|%-e|%-H", 0, " 1|1|0");
        assert_eq!(strftime("%-f", 0), Err('f'));
        assert_eq!(strftime("%Q", 0), Err('Q'));
        assert_eq!(strftime("%", 0), Err('%'));
    }
}
